"""Training: what a step does, what is said to be in force, and the command line."""

import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import costs
from nsa.config import PRESETS
from nsa.data import ByteStream, DataError, open_stream, text_corpus, unigram_entropy
from nsa.devices import process_group
from nsa.errors import TrainError
from nsa.flags import Flags, Launch
from nsa.ops import Routes
from nsa.peaks import peak_flops
from nsa.progress import Progress
from nsa.tests.gpu import no_waiting
from nsa.train import NonFiniteError, configure, main, train
from nsa.train_config import COMPILE, Compile, TrainConfig
from nsa.trainer import Trainer, _check_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

TINY = PRESETS["tiny"]
DENSE = replace(TINY, attention="dense")
MASKED = Flags(force_sel_mask=True)
"""The quickest route on a CPU."""


def tiny(**settings) -> TrainConfig:
    """A step in milliseconds: the tiny model, 24 tokens."""
    return TrainConfig(**{"model": TINY, "seq_len": 24, "batch_size": 2, **settings})


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def apart(one: Trainer, other: Trainer) -> float:
    """How far the weights of two are from each other, by norm."""
    return float((weights(one) - weights(other)).norm() / weights(other).norm())


def losses(config: TrainConfig, steps: int) -> list[float]:
    with Trainer(config) as trainer:
        return [trainer.step().item() for _ in range(steps)]


def planted(batches: Iterable[Tensor]) -> ByteStream:
    """A stream of these batches."""
    left = iter(batches)
    return ByteStream("planted", lambda: next(left).numpy())


def step_on(trainer: Trainer, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a step on these batches, and the gradient that the optimiser was shown."""
    shown: list[Tensor] = []

    def spy(*_: object) -> None:
        shown.extend(p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None)

    trainer.stream = planted(batches)
    handle = trainer._optimiser.register_step_pre_hook(spy)
    loss = trainer.step()
    handle.remove()
    return loss, torch.cat(shown)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The person who runs the tests may have some set."""
    for name in Flags.from_env().set_names:
        monkeypatch.delenv(name)


# --- learning ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_training_beats_the_unigram_entropy_on_text_it_has_not_seen(model) -> None:
    """On 16 KiB of it: the files, and so the text, differ from one Python to the next."""
    config = TrainConfig(
        model=model, seq_len=32, batch_size=8, steps=250, lr=2e-2, warmup_steps=5, weight_decay=0.0
    )
    with Trainer(config, MASKED) as trainer:
        *_, last = train(trainer, log_every=250, held_out_batches=64)

    unigram = unigram_entropy(text_corpus("held_out"))
    assert last.held_out_bits_per_byte is not None
    assert last.held_out_bits_per_byte < unigram - 0.5


def test_a_fresh_model_knows_nothing() -> None:
    with Trainer(tiny()) as trainer:
        assert trainer.step().item() / math.log(2) == pytest.approx(8, abs=0.2)


# --- one step ----------------------------------------------------------------------------


def test_the_seed_decides_weights_and_data() -> None:
    def run(seed: int) -> list[float]:
        return losses(tiny(seed=seed), 3)

    assert run(0) == run(0) != run(1)


def test_building_a_trainer_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    Trainer(tiny()).close()
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_step_predicts_the_next_byte_and_starts_from_no_gradient() -> None:
    with Trainer(tiny(clip=1e9)) as trainer:
        trainer.step()
        batch = next(trainer.stream)
        expected = trainer.model.loss(batch[:, :-1], batch[:, 1:])
        gradients = torch.autograd.grad(expected, list(trainer.model.parameters()))

        loss, gradient = step_on(trainer, [batch])

    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in gradients]))


def test_accumulation_equals_one_larger_batch() -> None:
    with (
        Trainer(tiny(batch_size=4, clip=1e9)) as whole,
        Trainer(tiny(batch_size=2, accum=2, clip=1e9)) as halves,
    ):
        batch = next(whole.stream)
        loss, gradient = step_on(whole, [batch])
        mean_loss, accumulated = step_on(halves, batch.chunk(2))

    torch.testing.assert_close(mean_loss, loss)
    torch.testing.assert_close(accumulated, gradient, atol=1e-6, rtol=1e-4)
    assert whole.steps_done == halves.steps_done == 1


def test_checkpointing_changes_neither_loss_nor_weights() -> None:
    with Trainer(tiny()) as plain, Trainer(tiny(checkpointing="on")) as checkpointed:
        for _ in range(2):
            assert plain.step().item() == checkpointed.step().item()
        assert torch.equal(weights(plain), weights(checkpointed))


def test_a_step_follows_the_gradient_and_the_schedule() -> None:
    """Adam's first step moves a parameter by about the learning rate, whatever the gradient."""
    config = tiny(lr=1e-3, warmup_steps=4, weight_decay=0.0)
    with Trainer(config) as trainer:
        before = weights(trainer)
        trainer.step()
        moved = (weights(trainer) - before).abs().max().item()
    assert moved == pytest.approx(config.learning_rate(0), rel=0.01)


def test_the_gradient_is_clipped() -> None:
    with Trainer(tiny(clip=1e-3)) as trainer:
        _, gradient = step_on(trainer, [next(trainer.stream)])
    assert gradient.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_weights_decay_but_norms_and_biases_do_not() -> None:
    with Trainer(tiny(lr=1e-9, weight_decay=1e8, warmup_steps=0)) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.step()
        for name, p in trainer.model.named_parameters():
            expected = before[name] * (0.9 if p.ndim >= 2 else 1.0)
            torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        pytest.param(0, 0.25, id="warm-up begins above zero"),
        pytest.param(3, 1.0, id="peak"),
        pytest.param(9, 0.55, id="half way down"),
        pytest.param(14, 0.1, id="end"),
        pytest.param(99, 0.1, id="past the end"),
    ],
)
def test_learning_rate(step: int, rate: float) -> None:
    config = tiny(lr=1.0, warmup_steps=4, steps=14, min_lr_ratio=0.1)
    assert config.learning_rate(step) == pytest.approx(rate)


# --- precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_like_float32(precision: str) -> None:
    exact = losses(tiny(), 4)
    assert losses(tiny(precision=precision), 4) == pytest.approx(exact, rel=0.02)


def test_fp16_gradients_are_clipped_and_applied_without_their_scale() -> None:
    with Trainer(tiny()) as exact, Trainer(tiny(precision="fp16")) as scaled:
        batch = next(exact.stream)
        (_, expected), (_, gradient) = step_on(exact, [batch]), step_on(scaled, [batch])
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_fp16_skips_a_step_that_overflows_and_lowers_the_scale() -> None:
    config = tiny(precision="fp16", initial_scale=2.0**40)
    with Trainer(config) as trainer:
        before = weights(trainer)
        trainer.step()

        assert torch.equal(weights(trainer), before)
        assert trainer.effective()["loss_scale"] == 2.0**39


# --- compiled, and as a CUDA graph -------------------------------------------------------


@pytest.fixture
def _quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces and differentiates as always, but generates no code."""
    monkeypatch.setattr("nsa.compiled.BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The compiler looks at the gradient of every input; its warning shows only where it is an error.
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@COMPILES
@pytest.mark.usefixtures("_quick_compiler")
def test_a_compiled_step_trains_alike() -> None:
    config = tiny(accum=2, checkpointing="1-1")
    with Trainer(config) as plain, Trainer(replace(config, compile="on")) as fast:
        for _ in range(3):
            torch.testing.assert_close(fast.step(), plain.step())
        assert apart(fast, plain) < 1e-5
        torch.testing.assert_close(fast.held_out_loss(1), plain.held_out_loss(1))
        assert (plain.effective()["compile"], fast.effective()["compile"]) == ("off", "on")
        assert fast.effective()["gc"] == "1-1"


def test_compiled_is_what_ran_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lm", "module", "trainer"):
        monkeypatch.setattr(f"nsa.{module}.compiled", lambda function: function)
    with Trainer(tiny(compile="on")) as trainer:
        trainer.step()
        assert trainer.effective()["compile"] == "off"


def test_a_compiler_that_fails_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa.compiled.BACKEND", "no such backend")
    torch._dynamo.reset()

    assert main([*QUICK, "--compile", "on"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: torch.compile failed: ")
    assert "no such backend" in error
    assert "--compile off" in error


class _Replayed:
    """A CapturedStep without a GPU: warms up in the same way, and then calls the step."""

    def __init__(self, step, batches, *, device, before_capture) -> None:
        for _ in range(2):
            step(batches)
        before_capture()
        step(batches)  # what a capture records, but does not compute
        before_capture()
        self.step = step

    def __call__(self, batches):
        seen = self.step.__self__._seen
        loss = self.step(batches)
        self.step.__self__._seen = seen  # a replay shows Python nothing
        return loss


def test_the_warm_up_of_a_graph_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.trainer.CapturedStep", _Replayed)
    monkeypatch.setattr("nsa.trainer._check_graph", lambda *_: None)
    config = tiny(accum=2, warmup_steps=2)
    with Trainer(config) as plain, Trainer(replace(config, cuda_graph=True)) as graphed:
        for step in range(4):
            torch.testing.assert_close(graphed.step(), plain.step())
            rates = [float(group["lr"]) for group in graphed._optimiser.param_groups]
            assert rates == pytest.approx([config.learning_rate(step)] * 2)
        # The rate is a float32 on the device there, a float64 on the host here.
        assert apart(graphed, plain) < 1e-6
        assert graphed.steps_done == 4
        observed, expected = graphed.effective(), plain.effective()
    assert observed == {**expected, "graph": "on"}


@pytest.mark.parametrize(
    ("settings", "device", "launch", "message"),
    [
        ({}, "cpu", Launch(), r"a CUDA graph on cpu\n  Use --device cuda"),
        ({}, "cuda", Launch(rank=1, world_size=2), "over 2 processes"),
        ({"precision": "fp16"}, "cuda", Launch(), "a CUDA graph in fp16.*\n  Use --precision bf16"),
    ],
)
def test_where_a_step_cannot_be_a_graph(
    settings: dict[str, Any], device: str, launch: Launch, message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        _check_graph(tiny(**settings), torch.device(device), launch)


def test_a_graph_on_the_cpu_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*QUICK, "--cuda-graph"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: a CUDA graph on cpu")


@pytest.mark.gpu
@needs_gpu
@COMPILES
@pytest.mark.parametrize("compile_", COMPILE)
@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_a_replayed_step_trains_alike(model, checkpointing: str, compile_: Compile) -> None:
    """MASKED waits for nothing, so it can be captured."""
    config = tiny(model=model, accum=2, checkpointing=checkpointing, device="cuda", warmup_steps=2)
    fast = replace(config, compile=compile_, cuda_graph=True)
    with Trainer(config, MASKED) as plain, Trainer(fast, MASKED) as graphed:
        logged = [trainer.step() for _ in range(4) for trainer in (plain, graphed)]
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
@COMPILES
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


def test_effective_tells_what_went_by() -> None:
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
def test_the_gpu_starts_from_the_same_weights() -> None:
    with Trainer(tiny()) as on_cpu, Trainer(tiny(device="cuda")) as on_gpu:
        assert torch.equal(weights(on_cpu), weights(on_gpu).cpu())
        torch.testing.assert_close(on_gpu.step().cpu(), on_cpu.step(), rtol=1e-3, atol=0)


# --- the loop ----------------------------------------------------------------------------


def test_progress_comes_first_every_so_often_and_last() -> None:
    with Trainer(tiny(steps=8)) as trainer:
        progress = list(train(trainer, log_every=3))

    assert [p.step for p in progress] == [1, 3, 6, 8]
    assert [p.tokens_per_s is None for p in progress] == [True, False, False, False]
    assert all(p.bits_per_byte == pytest.approx(p.loss / math.log(2)) for p in progress)
    assert all(p.held_out_bits_per_byte is None for p in progress)


def test_throughput_counts_the_interval_and_neither_the_first_step_nor_the_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that only training and reading turn: 100 s the first step, 2 s each other."""
    clock = [0.0]
    monkeypatch.setattr("nsa.train.time.perf_counter", lambda: clock[0])
    with Trainer(tiny(steps=5, accum=2)) as trainer:
        taken = iter([100.0, 2.0, 2.0, 2.0, 2.0])

        def step() -> Tensor:
            clock[0] += next(taken)
            return torch.tensor(1.0)

        def held_out_loss(batches: int) -> Tensor:
            clock[0] += 50.0
            return torch.tensor(float(batches))

        monkeypatch.setattr(trainer, "step", step)
        monkeypatch.setattr(trainer, "held_out_loss", held_out_loss)
        progress = list(train(trainer, log_every=2, held_out_batches=3))

    assert [p.mfu for p in progress] == [None] * 4, "no data sheet of this CPU"
    tokens = 2 * 24 * 2
    assert [p.tokens_per_s for p in progress] == [None, tokens / 2, tokens / 2, tokens / 2]
    assert progress[-1].held_out_bits_per_byte == pytest.approx(3 / math.log(2))


def test_utilisation_is_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a second on a device that could do ten times as much."""
    clock = [0.0]
    monkeypatch.setattr("nsa.train.time.perf_counter", lambda: clock[0])
    config = tiny(steps=3, accum=2)
    flops = 2 * costs.training_flops(TINY, batch=2, tokens=24)
    monkeypatch.setattr(Trainer, "peak_flops", 10.0 * flops)
    with Trainer(config) as trainer:

        def step() -> Tensor:
            clock[0] += 1.0
            return torch.tensor(1.0)

        monkeypatch.setattr(trainer, "step", step)
        progress = list(train(trainer, log_every=1))

    assert [p.mfu for p in progress] == [None, pytest.approx(0.1), pytest.approx(0.1)]
    assert "MFU" not in str(progress[0])
    assert "MFU 10.0%" in str(progress[1])


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312e12),
        ("NVIDIA H200", None, None),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, None),
    ],
)
def test_peaks_are_those_of_data_sheets(
    gpu: str, dtype: torch.dtype | None, peak: float | None
) -> None:
    assert peak_flops(gpu, dtype) == peak


def test_the_logged_loss_is_the_mean_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(tiny(steps=3)) as trainer:
        values = iter(torch.tensor([7.0, 1.0, 3.0]))
        monkeypatch.setattr(trainer, "step", lambda: next(values))
        assert [p.loss for p in train(trainer, log_every=3)] == [7.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_at_the_next_log(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    with Trainer(tiny(steps=9)) as trainer:
        values = iter(torch.tensor([1.0, 1.0, value, 1.0]))
        monkeypatch.setattr(trainer, "step", lambda: next(values))
        with pytest.raises(NonFiniteError, match=r"at step 4; it was finite up to step 2"):
            list(train(trainer, log_every=2))


# --- configuration -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be positive"),
        ({"lr": math.nan}, "lr=nan must be positive"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"seed": 2**63}, "must be under 2"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be 0 or more"),
        ({"loader_timeout_s": 0}, "loader_timeout_s=0 must be positive"),
        ({"compile": "yes"}, "compile='yes' is neither 'off' nor 'on'"),
        ({"precision": "tf32"}, "precision='tf32' is none of fp32, bf16, fp16"),
        ({"checkpointing": "1-2"}, "within '0-1'"),
    ],
)
def test_settings_that_cannot_be_trained_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_an_unknown_dataset_is_found_before_anything_is_built() -> None:
    with pytest.raises(DataError, match="Did you mean 'synthetic'"):
        tiny(dataset="synthetics")


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "Use cpu, cuda or cuda:N"), ("meta", "neither"), ("cuda:99", "99 is not among")],
)
def test_a_device_that_is_not_here(device: str, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        Trainer(tiny(device=device))


def test_options_win_over_variables_and_these_over_the_preset() -> None:
    flags = Flags(seq_len=100, batch_size=3, no_gc=True)

    config, origins = configure("125m", {"seq_len": 50, "attention": "dense"}, flags)

    assert (config.seq_len, config.batch_size, config.accum) == (50, 3, 1)
    assert (config.checkpointing, config.precision) == ("off", "bf16")
    assert config.model == replace(PRESETS["125m"], attention="dense")
    assert origins == {"batch_size": "NSA_BATCH_SIZE", "checkpointing": "NSA_NO_GC"}


# --- command line ------------------------------------------------------------------------

QUICK = ["--preset", "tiny", "--seq-len", "16", "--batch-size", "2", "--steps", "2", "--device=cpu"]


def test_the_boot_line_says_what_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_ACCUM", "2")
    monkeypatch.setenv("NSA_SEQ_LEN", "99")
    monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")

    assert main([*QUICK, "--no-gc", "--dataset", "synthetic"]) == 0

    boot, observed, first, last = capsys.readouterr().out.splitlines()
    assert boot == (
        "[boot] effective config: preset=tiny attention=nsa S=16 (--seq-len) B=2 (--batch-size) "
        "accum=2 (NSA_ACCUM) gc=off (--no-gc) compile=off graph=off precision=fp32 "
        "dataset=synthetic (--dataset) steps=2 (--steps) lr=0.003 seed=0 "
        "routes=compress:eager,scores:eager,select:loop,window:eager (NSA_SEL_RANGES_V2) "
        "prefill=token (NSA_PREFILL_BATCHED) device=cpu (--device) processes=1 params=0.1M"
    )
    assert "select:loop" in observed
    assert "prefill=token" in observed
    assert "step      1" in first
    assert "tokens/s -" in first
    assert "step      2" in last
    assert "tokens/s -" not in last


def test_the_boot_line_of_dense_attention_credits_no_flag_with_its_route(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")

    assert main([*QUICK, "--attention", "dense"]) == 0

    boot, observed, *_ = capsys.readouterr().out.splitlines()
    assert " routes=dense:sdpa prefill=" in boot
    assert " routes=dense:sdpa fa2=off " in observed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlen", "5"], "unknown option --seqlen\n  Did you mean --seq-len?"),
        (["--ddp", "0"], "unknown option --ddp\n  python -m nsa.train --help lists"),
        (["resume"], "unknown argument resume\n"),
        (["--steps=5", "--no-cg"], "unknown option --no-cg\n  Did you mean --no-gc?"),
        (["--seq", "5"], "unknown option --seq\n"),
        (["--seq-len", "0"], "--seq-len: '0' is not a whole number of at least 1"),
        (["--preset", "smal"], "Did you mean small?"),
        (["--precision", "bf61"], "Did you mean bf16?"),
        (["--attention", "sparse"], "'sparse' is none of nsa, dense"),
        (["--dataset", "txt"], "Did you mean 'text'?"),
        (["--gc", "3-9"], "'3-9' is neither 'off', 'on' nor a range"),
        (["--gc", "on", "--no-gc"], "--no-gc: not allowed with argument --gc"),
        (["--lr", "-1"], "lr=-1.0 must be positive"),
        (["--curve", "curve.jpeg"], "--curve: 'curve.jpeg' does not end in .png"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--dataset", "fineweb_edu:/nowhere"], "/nowhere: no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_message_and_exit_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NSA_SEQLEN", "5", "Did you mean NSA_SEQ_LEN?"),
        ("NSA_BATCH_SIZE", "many", "NSA_BATCH_SIZE='many'"),
        ("NSA_TB_DISABLE", "0", "Add --out DIR"),
        ("RANK", "1", "WORLD_SIZE"),
    ],
)
def test_bad_variables_are_one_message_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(name, value)

    assert main(QUICK) == 2

    assert message in capsys.readouterr().err


def test_a_route_that_cannot_run_here_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_USE_FA2_WIN", "1")

    assert main(QUICK) == 2

    assert "fa2-torch" in capsys.readouterr().err


def test_malformed_data_stops_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "alpha"}\n{"text": ')

    assert main([*QUICK, "--dataset", f"fineweb_edu:{file}"]) == 2

    assert f"error: {file}:2: not JSON" in capsys.readouterr().err


def test_a_diverging_loss_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: torch.tensor(math.nan))

    assert main(QUICK) == 1

    assert "the loss is nan at step 1" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([torch.tensor(1.0)])

    def step(_: Trainer) -> Tensor:
        for loss in losses:
            return loss
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(Trainer, "effective", lambda _: {})

    assert main([*QUICK, "--out", str(tmp_path)]) == 130

    assert capsys.readouterr().err.startswith("error: interrupted")
    assert len((tmp_path / "train.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize("empty", [np.empty, torch.empty])
def test_a_host_without_memory_is_one_message(
    empty: Callable[[int], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: empty(2**58))

    assert main(QUICK) == 2

    assert "lower --batch-size" in capsys.readouterr().err


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: torch.ones(2) @ torch.ones(3))

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        main(QUICK)


def test_csv_log_and_curve(tmp_path: Path) -> None:
    curve = tmp_path / "figures" / "curve.png"

    assert main([*QUICK, "--out", str(tmp_path), "--curve", str(curve), "--held-out", "1"]) == 0

    header, first, last = (tmp_path / "train.csv").read_text().splitlines()
    assert header.split(",") == list(Progress.__dataclass_fields__)
    assert first.split(",")[0] == "1"
    assert first.split(",")[4] == "", "no throughput from a first call"
    assert float(last.split(",")[4]) > 0
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_csv_log_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_DISABLE_CSV_LOGS", "1")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main([*QUICK, "--out", str(tmp_path / "file")]) == 2

    assert "cannot be written: " in capsys.readouterr().err


def test_a_curve_that_cannot_be_written_is_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    assert main([*QUICK, "--curve", str(tmp_path / "file" / "curve.png")]) == 2

    captured = capsys.readouterr()
    assert "cannot be written: " in captured.err
    assert captured.out == ""


def test_a_full_disk_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").symlink_to("/dev/full")

    assert main([*QUICK, "--out", str(tmp_path)]) == 2

    assert "train.csv: cannot be written: No space left on device" in capsys.readouterr().err


def test_tensorboard_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_TB_DISABLE", "0")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    assert main([*QUICK, "--out", str(tmp_path)]) == 2

    assert "pip install tensorboard" in capsys.readouterr().err


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("NSA_TB_DISABLE", "0")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert list(tmp_path.glob("events.out.tfevents.*"))


# --- several processes -------------------------------------------------------------------


def test_processes_that_cannot_meet_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    assert main(QUICK) == 2

    error = capsys.readouterr().err
    assert "MASTER_ADDR" in error
    assert "Start with torchrun." in error


TOGETHER = {"off": Flags(ddp_bucket_mb=1), "fp16": Flags(ddp_compress="fp16")}


def train_in_a_group(rank: int, port: int, folder: Path) -> None:
    """One of two processes: trains with each of TOGETHER, and files losses and weights."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    launch = Launch(rank=rank, world_size=2, local_rank=rank)
    results = {}
    with process_group(launch, "cpu"):
        for name, flags in TOGETHER.items():
            with Trainer(tiny(steps=2, accum=2), flags, launch) as trainer:
                logged = [p.loss for p in train(trainer, log_every=1)]
                results[name] = (logged, weights(trainer), trainer.effective()["world_size"])
    torch.save(results, folder / f"{rank}.pt")


def test_two_processes_train_as_one_on_the_data_of_both(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(train_in_a_group, args=(port, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    with Trainer(tiny(steps=2, accum=4)) as alone:
        streams = [
            open_stream("text", batch_size=2, seq_len=24, rank=rank, world_size=2)
            for rank in (0, 1)
        ]
        alone.stream = planted(next(stream) for stream in cycle(streams))
        expected = [p.loss for p in train(alone, log_every=1)]

    for name, (least, most) in {"off": (0, 1e-6), "fp16": (1e-6, 1e-3)}.items():
        (logged, mine, world_size), (_, theirs, _) = ranks[0][name], ranks[1][name]
        assert world_size == 2
        assert torch.equal(mine, theirs)
        assert logged == pytest.approx(expected, rel=1e-5)
        error = (mine - weights(alone)).norm() / weights(alone).norm()
        assert least <= error <= most, f"gradients sent as {name}"
