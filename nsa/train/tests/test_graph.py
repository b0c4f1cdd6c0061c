"""Training compiled and replayed as a CUDA graph, and the configuration reported as effective."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.config import Routes
from nsa.errors import TrainError
from nsa.flags import Flags
from nsa.tests.gpu import no_waiting
from nsa.train.__main__ import main
from nsa.train.config import COMPILE, Compile
from nsa.train.data import open_stream
from nsa.train.graph import CapturedStep
from nsa.train.loop import Trainer, _check_graph
from nsa.train.tests.training import (
    DENSE,
    MASKED,
    QUICK,
    QUICK_COMPILER,
    TINY,
    TORCH_LOOKS_AT_GRAD,
    apart,
    graphs_without_a_gpu,
    needs_gpu,
    planted,
    tiny,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")


# --- compiled, and as a CUDA graph -------------------------------------------------------


@TORCH_LOOKS_AT_GRAD
@QUICK_COMPILER
@pytest.mark.parametrize("routes", [Routes(), Routes(compress="off"), Routes(select="off")])
def test_a_compiled_step_trains_alike(routes: Routes) -> None:
    config = tiny(accum=2, checkpointing="1-1", routes=routes)
    with Trainer(config) as plain, Trainer(replace(config, compile="on")) as fast:
        for _ in range(3):
            torch.testing.assert_close(fast.step(), plain.step())
        assert apart(fast, plain) < 1e-5
        torch.testing.assert_close(fast.held_out_loss(1), plain.held_out_loss(1))
        assert (plain.effective()["compile"], fast.effective()["compile"]) == ("off", "on")
        assert fast.effective()["gc"] == "1-1"


def test_compiled_is_what_ran_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.language_model", "model.attention", "train.loop"):
        monkeypatch.setattr(f"nsa.{module}.compiled", lambda function: function)
    with Trainer(tiny(compile="on")) as trainer:
        trainer.step()
        assert trainer.effective()["compile"] == "off"


def test_a_compiler_that_fails_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa.model.compiled.BACKEND", "no such backend")
    torch._dynamo.reset()

    assert main([*QUICK, "--compile", "on"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: torch.compile failed: ")
    assert "no such backend" in error
    assert "--compile off" in error


def test_the_warm_up_of_a_graph_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_without_a_gpu(monkeypatch)
    config = tiny(accum=2, warmup_steps=2)
    with Trainer(config) as plain, Trainer(replace(config, cuda_graph=True)) as graphed:
        for step in range(4):
            torch.testing.assert_close(graphed.step(replay=step % 2 == 1), plain.step())
            assert graphed.effective()["graph"] == ("off" if step == 2 else "on")
            rates = [float(group["lr"]) for group in graphed._optimiser.param_groups]
            assert rates == pytest.approx([config.learning_rate(step)] * 2)
        # The rate is a float32 on the device there, a float64 on the host here.
        assert apart(graphed, plain) < 1e-6
        assert graphed.steps_done == 4
        graph: Any = graphed._graph
        assert graph.replays == 3  # the first step captures in any case
        observed, expected = graphed.effective(), plain.effective()
    assert observed == {**expected, "graph": "on"}


@pytest.mark.parametrize(("ddp", "seen"), [(False, [3, "global"]), (True, [11, "thread_local"])])
def test_ddp_takes_more_steps_before_a_capture_that_its_watchdog_may_disturb(
    monkeypatch: pytest.MonkeyPatch, ddp: bool, seen: list[object]
) -> None:
    stream: Any = SimpleNamespace(device=None, wait_stream=lambda _: None)
    cuda: dict[str, Any] = dict.fromkeys(("Stream", "current_stream"), lambda _: stream)
    cuda |= {"CUDAGraph": object, "stream": nullcontext, "graph": mock.MagicMock()}
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    step, restore, used = mock.Mock(), mock.Mock(), stream if ddp else None
    restore.side_effect = lambda: setattr(restore, "after", step.call_count)

    CapturedStep(step, [], device=torch.device("cpu"), before_capture=restore, ddp_stream=used)

    assert [restore.after, cuda["graph"].call_args.kwargs["capture_error_mode"]] == seen
    assert step.call_count == restore.after + 1


def test_the_hooks_of_the_optimiser_see_each_step_and_no_warm_up_or_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs_without_a_gpu(monkeypatch)
    seen: list[object] = []
    with Trainer(tiny(cuda_graph=True)) as trainer:
        trainer._optimiser.register_step_post_hook(lambda optimiser, *_: seen.append(optimiser))
        for step in range(3):
            trainer.step(replay=step != 1)
    assert seen == [trainer._optimiser] * 3


@pytest.mark.parametrize(
    ("settings", "device", "unused", "message"),
    [
        ({}, "cpu", False, r"a CUDA graph needs a GPU, not cpu\n  Use --device cuda"),
        ({"precision": "fp16"}, "cuda", False, "cannot train in fp16.*\n  Use --precision bf16"),
        ({}, "cuda", True, "without the compress branch on several ranks"),
    ],
)
def test_where_a_step_cannot_be_a_graph(
    settings: dict[str, Any], device: str, unused: bool, message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        _check_graph(tiny(**settings), torch.device(device), unused)


@pytest.mark.gpu
@needs_gpu
@TORCH_LOOKS_AT_GRAD
@pytest.mark.parametrize("compile_", COMPILE)
@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_a_replayed_step_trains_alike(model, checkpointing: str, compile_: Compile) -> None:
    """MASKED waits for nothing, so it can be captured."""
    config = tiny(model=model, accum=2, checkpointing=checkpointing, device="cuda", warmup_steps=2)
    fast = replace(config, compile=compile_, cuda_graph=True)
    with Trainer(config, MASKED) as plain, Trainer(fast, MASKED) as graphed:
        logged = [t.step(replay=i != 2) for i in range(4) for t in (plain, graphed)]
        torch.testing.assert_close(logged[1::2], logged[::2], rtol=1e-4, atol=0)
        assert apart(graphed, plain) < 1e-4
        torch.testing.assert_close(
            graphed.held_out_loss(1), plain.held_out_loss(1), rtol=1e-4, atol=0
        )
        observed = {**plain.effective(), "graph": "on", "compile": compile_}
        assert graphed.effective() == observed
        torch.cuda.synchronize()
        with no_waiting():
            graphed.step()


@pytest.mark.gpu
@needs_gpu
@TORCH_LOOKS_AT_GRAD
@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_kernels_train_compiled_and_replayed(checkpointing: str) -> None:
    """The whole of it, as the 125M model trains, against the definition's routes."""
    config = tiny(precision="bf16", device="cuda", checkpointing=checkpointing, steps=8)
    fast = replace(config, routes=Routes.triton(), compile="on", cuda_graph=True)
    with Trainer(config) as plain, Trainer(fast) as graphed:
        logged = [trainer.step() for _ in range(8) for trainer in (plain, graphed)]
        torch.testing.assert_close(logged[1::2], logged[::2], rtol=0.02, atol=0)
        observed = graphed.effective()
    assert observed["graph"] == observed["compile"] == "on"
    assert observed["gc"] == checkpointing
    assert "select:triton" in str(observed["routes"])


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_waits_for_the_gpu_cannot_be_a_graph() -> None:
    config = tiny(device="cuda", cuda_graph=True, routes=Routes(select="packed"))
    with Trainer(config) as trainer, pytest.raises(TrainError, match="do not wait for the device"):
        trainer.step()


# --- what is in force --------------------------------------------------------------------


def test_effective_before_a_step_is_refused() -> None:
    with Trainer(tiny()) as trainer, pytest.raises(RuntimeError, match="call step"):
        trainer.effective()


def test_effective_reports_what_ran() -> None:
    config = tiny(accum=3, checkpointing="1-1", precision="bf16", dataset="synthetic")
    with Trainer(config, Flags(use_sel_pack=True)) as trainer:
        trainer.step()
        trainer.held_out_loss(1)
        effective = trainer.effective()

    assert effective == {
        "attention": "nsa",
        "seq_len": 24,
        "batch": 2,
        "accum": 3,
        "gc": "1-1",
        "compile": "off",
        "graph": "off",
        "parameter_dtype": "float32",
        "autocast_dtype": "bfloat16",
        "precision": "bf16",
        "logits_dtype": "bfloat16",
        "loss_scale": 1.0,
        "routes": "compress:eager,scores:eager,select:packed,window:eager",
        "fa2": "off",
        "prefill": "batched",
        "data": "synthetic",
        "device": "cpu",
        "world_size": 1,
        "parameters": trainer.model.num_parameters,
    }


def test_effective_is_observed_not_echoed() -> None:
    """The configuration asks for 24 tokens and no checkpointing; something else goes by."""
    with Trainer(tiny()) as trainer:
        trainer.stream = planted([torch.zeros(1, 10)])
        trainer._layers = frozenset({0})
        trainer.model.double()
        trainer.step()
        effective = trainer.effective()

    assert (effective["seq_len"], effective["batch"], effective["gc"]) == (9, 1, "0-0")
    assert effective["parameter_dtype"] == effective["logits_dtype"] == "float64"


@pytest.mark.parametrize(
    ("settings", "routes", "prefill"),
    [
        pytest.param({}, "compress:eager,scores:eager,select:gather,window:eager", "batched"),
        pytest.param({"routes": Routes.reference(), "prefill": "token"}, "reference", "token"),
        pytest.param({"model": DENSE}, "dense:sdpa", "batched"),
        pytest.param({"model": DENSE, "dense_backend": "math"}, "dense:math", "batched"),
    ],
    ids=["flags decide", "configuration decides", "dense", "dense by another backend"],
)
def test_effective_routes(settings: dict[str, Any], routes: str, prefill: str) -> None:
    with Trainer(tiny(**settings)) as trainer:
        trainer.step()
        effective = trainer.effective()
    assert routes in str(effective["routes"])
    assert effective["prefill"] == prefill


class CountReads(TorchDispatchMode):
    """Counts the operators that make the host wait for a value on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_a_step_reads_no_value_back(model) -> None:
    with Trainer(tiny(model=model, accum=2), MASKED) as trainer, CountReads() as counter:
        loss = trainer.step()
        assert counter.reads == 0
        loss.item()
        assert counter.reads == 1, "the counter can count"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_a_step_does_not_wait_for_the_gpu(model, precision: str) -> None:
    with Trainer(tiny(model=model, precision=precision, accum=2, device="cuda")) as trainer:
        trainer.step()
        torch.cuda.synchronize()
        with no_waiting():
            trainer.step()
        assert trainer.effective()["device"] == "cuda:0"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "graph"])
def test_the_next_batches_lie_ready_while_the_gpu_computes(cuda_graph: bool) -> None:
    config = tiny(model=DENSE, accum=2, device="cuda", cuda_graph=cuda_graph, dataset="text")
    with Trainer(config) as trainer, open_stream("text", batch_size=2, seq_len=24) as plain:
        trainer.step()
        ready = [next(trainer.stream) for _ in range(3)]
        expected = [next(plain) for _ in range(5)][2:]

    assert [batch.is_pinned() for batch in ready] == [True, True, False]
    assert all(map(torch.equal, ready, expected))


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_starts_from_the_same_weights() -> None:
    with Trainer(tiny()) as on_cpu, Trainer(tiny(device="cuda")) as on_gpu:
        assert torch.equal(weights(on_cpu), weights(on_gpu).cpu())
        torch.testing.assert_close(on_gpu.step().cpu(), on_cpu.step(), rtol=1e-3, atol=0)
