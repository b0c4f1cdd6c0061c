"""The workloads the shipped suites name: right when the code is, and caught when it is not."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.analysis import bounds
from harness.measure import accuracy
from harness.measure.failures import Failed
from harness.records import Case, Scalar, Suite
from harness.suite import load as suite_module
from harness.workload import Factory, Unsupported, Workload
from nsa import ops, reference
from nsa.config import Routes
from nsa.flags import FlagError, Flags
from nsa.model.attention import DenseAttention, NSAttention
from nsa.roofline import peak_flops
from nsa.routes import selected
from suites import workloads
from suites.axes import READ_FLAGS, AxisError
from suites.tests.small import OPERATOR, needs_no_gpu

MODEL: Mapping[str, Scalar] = {"preset": "tiny", "batch": 2, "precision": "fp32"}


@pytest.mark.parametrize("provider", ["nsa", "dense"])
@pytest.mark.parametrize(
    ("factory", "axes"),
    [
        (workloads.train, {**MODEL, "seq_len": 40, "accum": 2, "gc": "on"}),
        (workloads.forward, {**MODEL, "seq_len": 40}),
        (workloads.decode, {**MODEL, "context": 21, "new_tokens": 3}),
    ],
    ids=["train", "forward", "decode"],
)
def test_the_language_model_agrees_with_its_definition(
    factory: Factory, axes: Mapping[str, Scalar], provider: str
) -> None:
    workload = factory(provider, axes)

    compared = accuracy.compare(workload)

    assert compared.tensors
    accuracy.require_finite_output(workload.run())
    assert workload.flops
    assert workload.effective
    seen = workload.effective()
    assert seen["batch"] == 2
    assert seen["attention"] == provider
    sizes = "tiny: 2 layers of 32, 4 query and 2 key heads of 16, feed forward 128"
    sparse = "; NSA l=8, d=4, l'=8, n=4, w=16" if provider == "nsa" else ""
    assert seen["model"] == f"{sizes}{sparse}; 0.1 M parameters"


def test_a_reference_draws_no_weights() -> None:
    """Those of the model are taken; to draw others first takes a second."""
    workload = workloads.forward("nsa", {**MODEL, "seq_len": 40})
    assert workload.reference
    before = torch.get_rng_state()

    workload.reference()

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("provider", ["nsa", "dense"])
def test_a_layer_agrees_with_its_definition_and_is_called_as_a_module(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = {"nsa": NSAttention, "dense": DenseAttention}[provider]
    called, forward = list[int](), kind.forward
    workload = workloads.layer(provider, {**MODEL, "seq_len": 40})

    def counted(self: Any, *x: Any, **given: Any) -> Any:
        called.append(1)
        return forward(self, *x, **given)

    monkeypatch.setattr(kind, "forward", counted)

    assert accuracy.compare(workload).tensors
    assert called
    accuracy.require_finite_output(workload.run())
    assert workload.effective
    assert workload.effective()["attention"] == provider


@pytest.mark.parametrize("branch", ["whole", "compress", "select", "window"])
@pytest.mark.parametrize(
    "provider", ["reference", "loop", "gather", "masked", "packed", "varlen", "dense"]
)
def test_the_operator_agrees_with_its_definition(provider: str, branch: str) -> None:
    if provider == "dense" and branch != "whole":
        pytest.skip("dense attention has no branches")
    workload = workloads.attention(provider, {**OPERATOR, "branch": branch})

    compared = accuracy.compare(workload)

    assert {"o", "dq"} <= {t.name for t in compared.tensors}
    accuracy.require_finite_output(workload.run())


@pytest.mark.parametrize(
    ("provider", "branch"), [("dense", "whole"), ("eager", "compress"), ("eager", "window")]
)
def test_no_blocks_are_selected_for_attention_without_them(
    provider: str, branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "select_blocks", None)
    workload = workloads.attention(provider, {**OPERATOR, "branch": branch})

    assert accuracy.compare(workload).tensors
    workload.run()


def test_selection_is_judged_by_what_the_blocks_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {**OPERATOR, "pass": "forward", "branch": "scores"}
    accuracy.compare(workloads.attention("gather", axes))
    monkeypatch.setattr(
        "nsa.routes.eager.top_blocks", lambda i, *a, **kw: reference.top_blocks(-i, *a, **kw)
    )

    with pytest.raises(Failed, match="selected"):
        accuracy.compare(workloads.attention("gather", axes))


def test_a_wrong_kernel_is_caught_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = selected._attend_rows
    monkeypatch.setattr(selected, "_attend_rows", lambda *args, **kw: 1.001 * honest(*args, **kw))

    with pytest.raises(Failed, match="o: error"):
        accuracy.compare(workloads.attention("gather", {**OPERATOR, "branch": "select"}))
    with pytest.raises(Failed, match="error"):
        accuracy.compare(workloads.forward("nsa", {**MODEL, "seq_len": 40}))


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_training_and_reports_know_the_same_peaks(gpu: str, dtype: torch.dtype, name: str) -> None:
    """Each house has its table, as neither imports the other."""
    assert bounds.peak(gpu, name) == peak_flops(gpu, dtype)


def test_flags_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_FORCE_SEL_MASK", "1")
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")
    workload = workloads.train("nsa", {**MODEL, "seq_len": 12})

    workload.run()

    assert workload.effective
    seen = workload.effective()
    assert "select:masked" in str(seen["routes"])
    assert seen["prefill"] == "token"


@needs_no_gpu
@pytest.mark.parametrize("factory", [workloads.train, workloads.forward])
def test_a_dense_provider_runs_its_own_backend_or_declines(factory: Factory) -> None:
    workload = factory("dense-flash", {**MODEL, "seq_len": 12})

    for call in (workload.check, workload.run):
        assert call
        with pytest.raises(Unsupported, match="flash: needs tensors on CUDA"):
            call()


@needs_no_gpu
def test_a_route_that_cannot_run_here_declines_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")

    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        workloads.decode("nsa", {**MODEL, "context": 21})
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        workloads.attention("gather", OPERATOR).run()


def test_data_that_cannot_be_read_declines_the_case(tmp_path: Path) -> None:
    axes: Mapping[str, Scalar] = {**MODEL, "seq_len": 16}
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no JSON\n")

    with pytest.raises(Unsupported, match="no such file or folder"):
        workloads.train("nsa", {**axes, "dataset": f"fineweb_edu:{tmp_path}/absent"})
    with pytest.raises(Unsupported, match=r"broken\.jsonl:1: not JSON"):
        workloads.train("nsa", {**axes, "dataset": f"fineweb_edu:{broken}"}).run()


@pytest.mark.parametrize("prefill", ["batched", "token"])
def test_a_context_is_prefilled_as_the_flag_says(
    prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = []
    honest: Any = ops.attention

    def spy(q: torch.Tensor, *args: object, **options: object) -> object:
        queries.append(q.shape[1])
        return honest(q, *args, **options)

    monkeypatch.setattr(ops, "attention", spy)
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "1" if prefill == "batched" else "0")
    workload = workloads.decode("nsa", {**MODEL, "context": 20})
    workload.run()

    assert max(queries) == (20 if prefill == "batched" else 1)
    assert workload.effective
    assert workload.effective()["prefill"] == prefill


def test_the_routes_reported_are_those_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workloads.forward("nsa", {**MODEL, "seq_len": 12})
    monkeypatch.setattr(Flags, "routes", lambda _: Routes(select="masked"))
    workload.run()

    assert workload.effective
    assert "select:masked" in str(workload.effective()["routes"])


def test_every_decoding_run_continues_from_the_same_context() -> None:
    workload = workloads.decode("nsa", {**MODEL, "context": 40, "new_tokens": 20})

    first = workload.run().clone()
    again = workload.run()

    assert torch.equal(first, again)


def _with_factories(suite: Suite) -> list[Case]:
    return [case for case in suite.cases if case.factory]


@pytest.mark.parametrize("path", suite_module.available(), ids=lambda path: path.stem)
def test_every_case_that_ships_passes_the_preflight(path: object) -> None:
    for case in _with_factories(suite_module.load(str(path))):
        function = case.factory.partition(":")[2]
        workloads.preflight(function, case.provider, case.axes, case.env)


def test_the_work_of_a_step_is_known_before_it_is_built() -> None:
    axes = {**OPERATOR, "pass": "forward"}

    built = workloads.attention("gather", axes)
    assert workloads.preflight("attention", "gather", axes, {}) == (built.flops, built.bytes)


def test_flags_a_workload_does_not_read_may_stand_in_the_environment() -> None:
    """People export theirs once, for training and suites alike."""
    env = {"NSA_FWE_Q": "4", "NSA_TB_DISABLE": "1", "NSA_DDP_BUCKET_MB": "25"}
    workloads.preflight("forward", "nsa", {**MODEL, "seq_len": 8}, env)


AXES_OF_SIZE = {
    "train": {**MODEL, "seq_len": 12, "accum": 2, "gc": "0-0", "precision": "bf16"},
    "forward": {**MODEL, "seq_len": 12, "precision": "bf16"},
    "decode": {**MODEL, "context": 21, "new_tokens": 3},
    "attention": {n: v for n, v in OPERATOR.items() if not n.endswith(("_size", "stride"))},
}


@pytest.mark.parametrize(("function", "axes"), AXES_OF_SIZE.items(), ids=AXES_OF_SIZE)
def test_shapes_precision_and_checkpointing_are_observed_under_their_axes(
    function: str, axes: Mapping[str, Scalar]
) -> None:
    """Else the harness cannot compare the request with what ran."""
    provider = "gather" if function == "attention" else "nsa"
    workload: Workload = getattr(workloads, function)(provider, axes)
    workload.run()

    assert workload.effective
    seen = workload.effective()
    assert {name: seen.get(name) for name in axes if name != "num_blocks"} == {
        name: value for name, value in axes.items() if name != "num_blocks"
    }


@pytest.mark.parametrize(
    ("function", "provider", "env", "unasked"),
    [
        ("train", "nsa", {"NSA_USE_SEL_PACK": "1", "NSA_PREFILL_BATCHED": "1"}, set()),
        ("train", "nsa", {"NSA_FWE_Q": "2"}, {"NSA_FWE_Q"}),  # its dataset is drawn
        ("train", "nsa", {"NSA_DISABLE_AUX_STATS": "1"}, set()),
        ("train", "dense", {"NSA_USE_SEL_PACK": "1"}, {"NSA_USE_SEL_PACK"}),
        ("train", "dense", {"NSA_DISABLE_AUX_STATS": "1"}, {"NSA_DISABLE_AUX_STATS"}),
        ("train", "dense", {"NSA_PREFILL_BATCHED": "1"}, set()),
        ("forward", "nsa", {"NSA_FORCE_SEL_MASK": "1"}, set()),
        ("forward", "dense", {"NSA_FORCE_SEL_MASK": "1"}, {"NSA_FORCE_SEL_MASK"}),
        ("decode", "nsa", {"NSA_FORCE_SEL_MASK": "1"}, set()),
        ("decode", "dense", {"NSA_FORCE_SEL_MASK": "1"}, {"NSA_FORCE_SEL_MASK"}),
        ("attention", "gather", {"NSA_USE_FA2_WIN": "0"}, set()),
        ("attention", "gather", {"NSA_USE_SEL_PACK": "1"}, {"NSA_USE_SEL_PACK"}),
        ("attention", "reference", {"NSA_USE_FA2": "0"}, {"NSA_USE_FA2"}),
    ],
)
def test_a_flag_that_is_not_read_is_reported(
    function: str,
    provider: str,
    env: Mapping[str, str],
    unasked: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    sizes = {"train": {"seq_len": 12}, "forward": {"seq_len": 12}, "decode": {"context": 9}}
    axes = OPERATOR if function == "attention" else {**MODEL, **sizes[function]}
    workload: Workload = getattr(workloads, function)(provider, axes)
    workload.run()

    assert workload.flags
    reported = workload.flags()
    assert reported.keys() == env.keys()
    assert {name for name, asked in reported.items() if not asked} == unasked


SMALL: Mapping[str, Scalar] = {"preset": "tiny", "seq_len": 12, "graph": "off", "compile": "off"}


def _flag_settings() -> dict[object, Case]:
    """One shipped case of every workload, provider and set of variables, at a small size."""
    found: dict[object, Case] = {}
    for path in suite_module.available():
        for case in _with_factories(suite_module.load(str(path))):
            function = case.factory.partition(":")[2]
            if case.env:
                small = {"attention": OPERATOR, "decode": {}}.get(function, SMALL)
                axes = {n: small.get(n, v) for n, v in case.axes.items()}
                key = (function, case.provider, *case.env.items())
                found.setdefault(key, replace(case, axes=axes))
    return found


@pytest.mark.parametrize("case", _flag_settings().values(), ids=lambda case: case.case_id)
def test_no_shipped_case_sets_a_flag_that_is_not_read(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    workload: Workload = getattr(workloads, case.factory.partition(":")[2])(
        case.provider, case.axes
    )
    with suppress(Unsupported):  # on this device; the flags are read before
        workload.run()

    assert workload.flags
    assert {name for name, asked in workload.flags().items() if not asked} == set()


def test_dense_attention_accepts_only_flags_without_effect() -> None:
    axes = {**MODEL, "seq_len": 8}
    for flag, value in (("NSA_USE_FA2", 0), ("NSA_SEL_RANGES_V2", 1)):
        workloads.preflight("train", "dense", {**axes, flag: value}, {flag: str(value)})

    with pytest.raises(AxisError, match=r"NSA_USE_FA2 has no effect here.*no branches"):
        workloads.preflight("train", "dense", {**axes, "NSA_USE_FA2": 1}, {"NSA_USE_FA2": "1"})
    given = {**OPERATOR, "NSA_USE_FA2": 1}
    with pytest.raises(AxisError, match="reference sets every route that runs"):
        workloads.preflight("attention", "reference", given, {"NSA_USE_FA2": "1"})


def test_a_replayed_step_can_be_profiled_without_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.loop._check_graph", lambda *_: None)
    taken: list[bool] = []
    monkeypatch.setattr("nsa.train.loop.Trainer.step", lambda _, replay=True: taken.append(replay))
    axes = {**MODEL, "seq_len": 8}
    assert workloads.train("nsa", axes).unreplayed is None

    unreplayed = workloads.train("nsa", {**axes, "graph": "on"}).unreplayed

    assert unreplayed is not None
    unreplayed()
    assert taken == [False]


def test_training_leaves_a_branch_out_and_its_reference_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSA_BRANCHES", "select,window")
    workload = workloads.train("nsa", {**MODEL, "seq_len": 40})
    assert workload.check is not None
    assert workload.reference is not None
    got, expected = workload.check(), workload.reference()
    workload.run()

    assert workload.effective is not None
    assert "compress:off" in str(workload.effective()["routes"])
    torch.testing.assert_close(got["loss"], expected["loss"].float())
    monkeypatch.delenv("NSA_BRANCHES")
    whole = workloads.train("nsa", {**MODEL, "seq_len": 40})
    assert not torch.allclose(whole.check()["loss"], got["loss"], rtol=1e-4)  # type: ignore[misc]
    assert workload.flops < whole.flops  # type: ignore[operator]
    for factory, axes in (("forward", {**MODEL, "seq_len": 8}), ("attention", OPERATOR)):
        with pytest.raises(AxisError, match="NSA_BRANCHES leaves a branch out"):
            workloads.preflight(
                factory,
                "nsa" if factory == "forward" else "gather",
                axes,
                {"NSA_BRANCHES": "window"},
            )


def test_every_flag_that_a_workload_reads_is_one() -> None:
    for names in READ_FLAGS.values():
        assert names <= {f"NSA_{field.name.upper()}" for field in fields(Flags)}


@pytest.mark.parametrize(
    ("function", "provider", "axes", "env", "message"),
    [
        ("train", "nsa", {**MODEL, "seq_leng": 8}, {}, "needs the axis 'seq_len'"),
        (
            "train",
            "nsa",
            {**MODEL, "seq_len": 8, "gcc": "on"},
            {},
            "the axis 'gcc'.*'gc'",
        ),
        ("train", "nsa", {**MODEL, "seq_len": 0}, {}, "seq_len=0"),
        ("train", "nsa", {**MODEL, "seq_len": 8, "preset": "tyny"}, {}, "did you mean 'tiny'"),
        ("forward", "nsaa", {**MODEL, "seq_len": 8}, {}, "did you mean 'nsa'"),
        ("attention", "gahter", OPERATOR, {}, "did you mean 'gather'"),
        ("attention", "dense", {**OPERATOR, "branch": "window"}, {}, "dense attention has no"),
        ("attention", "gather", {**OPERATOR, "branch": "scores"}, {}, "no gradient"),
        ("train", "nsa", {**MODEL, "seq_len": 8, "dataset": "texd"}, {}, "mean 'text'"),
        ("train", "nsa", {**MODEL, "seq_len": 8}, {"NSA_USE_FA3": "1"}, "NSA_USE_FA2"),
        ("train", "nsa", {**MODEL, "seq_len": 8}, {"NSA_SEQ_LEN": "9"}, "sweep seq_len"),
        ("train", "nsa", {**MODEL, "seq_len": 8, "NSA_DDP_COMPRESS": "off"}, {}, "train does not"),
        ("forward", "nsa", {**MODEL, "seq_len": 8, "NSA_FWE_Q": 2}, {}, "not read NSA_FWE_Q"),
        ("attention", "gather", {**OPERATOR, "NSA_USE_SEL_PACK": 1}, {}, "NSA_USE_FA2_WIN"),
    ],
)
def test_a_bad_case_is_refused_with_the_nearest_good_one(
    function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str], message: str
) -> None:
    with pytest.raises((AxisError, FlagError), match=message):
        workloads.preflight(function, provider, axes, env)


@pytest.mark.parametrize("provider", ["gather", "dense"])
def test_fresh_inputs_change_the_output_and_number_0_restores_it(provider: str) -> None:
    workload = workloads.attention(provider, {**OPERATOR, "branch": "whole"})
    assert workload.fresh
    first, other = workload.run(), {}

    for i in (1, 0):
        workload.fresh(i)
        other[i] = workload.run()

    assert all(not torch.equal(first[name], other[1][name]) for name in first)
    assert all(torch.equal(first[name], other[0][name]) for name in first)
