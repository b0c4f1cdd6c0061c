"""Counters and profile of a step: from the events of a made-up GPU profile, and from real ones."""

import gzip
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.measure import profile
from harness.measure.attestation import mismatch
from harness.measure.counters import StepCount
from harness.measure.profile import StepProfile
from harness.measure.profile_events import DRAIN, STEP, Event, EventKind, Trace
from harness.records import SAME_STEP, Case, PathRule, Use, by_range

MAIN, ENGINE, DEVICE = 1, 2, 7
US = 1000
BACKWARD = "autograd::engine::evaluate_function"


def op(name: str, start: int, end: int, number: int, *, thread: int = MAIN, seq: int = -1) -> Event:
    ids = thread, number, 0, seq, MAIN * ("Backward" in name or "autograd" in name)
    return Event(EventKind.OPERATOR, name, start * US, end * US, *ids)


def range_(name: str, start: int, end: int, number: int = 0, *, thread: int = MAIN) -> Event:
    return Event(EventKind.RANGE, name, start * US, end * US, thread, number)


def launch(at: int, number: int, name: str = "cudaLaunchKernel") -> Event:
    return Event(EventKind.RUNTIME, name, at * US, (at + 2) * US, MAIN, number)


def kernel(name: str, start: int, end: int, link: int, by: int = 0) -> Event:
    kind = EventKind.COPY if name.startswith("Memcpy") else EventKind.KERNEL
    return Event(kind, name, start * US, end * US, DEVICE, by, link)


def one_step(at: int = 0, first_id: int = 100) -> list[Event]:
    """100 us, of which the device works 40: twice in `select`, in its backward pass, and in a
    copy outside all ranges. A kernel of another stream overlaps."""
    i = first_id
    events = [
        range_(STEP, 0, 80, i),
        range_("select", 5, 40, i + 1),
        op("aten::bmm", 10, 20, i + 2, seq=3),
        op("aten::as_strided", 12, 14, i + 3),
        launch(15, 1001),
        kernel("gemm", 20, 30, i + 2),
        launch(30, 1002, "cuLaunchKernelEx"),  # by Triton, from no operator
        kernel("_select_kernel", 40, 50, i + 1),
        kernel("_other_stream", 45, 55, i + 1),
        op(f"{BACKWARD}: BmmBackward0", 50, 60, i + 4, thread=ENGINE, seq=3),
        op("aten::bmm", 52, 58, i + 5, thread=ENGINE, seq=3),
        launch(54, 1003),
        kernel("gemm", 60, 65, i + 5),
        op("aten::item", 65, 79, i + 6),
        launch(66, 1004, "cudaMemcpyAsync"),
        kernel("Memcpy DtoH (Device -> Pinned)", 70, 80, i + 6),
        launch(70, 1005, "cudaStreamSynchronize"),
        range_(DRAIN, 80, 100, i + 7),
        launch(81, 1006, "cudaDeviceSynchronize"),
    ]  # fmt: skip
    return [
        e._replace(
            start_ns=e.start_ns + at * US,
            end_ns=e.end_ns + at * US,
            id=e.id + at if e.kind is EventKind.RUNTIME else e.id,
        )
        for e in events
    ]


TWO_STEPS = [*reversed(one_step()), *one_step(1000, 200)]


@pytest.fixture
def trace() -> Trace:
    return Trace(TWO_STEPS)


def test_each_step_is_counted_separately() -> None:
    counts = Trace([*TWO_STEPS, launch(1020, 5000)]).counts()

    assert counts["kernel_launches"] == [3, 4]
    assert counts["device_waits"] == [1, 1]  # without the wait after the step
    assert counts["host_device_copies"] == [1, 1]


def test_what_the_backward_pass_computes_again_has_numbers_of_its_own() -> None:
    again = [range_("window", 44, 48, 200, thread=ENGINE)]
    again += [op("aten::mul", 45, 47, 201, thread=ENGINE, seq=3)]

    assert Trace([*one_step(), *again]).kernels() == Trace(one_step()).kernels()


def test_kernels_belong_to_ranges_also_in_the_backward_pass(trace: Trace) -> None:
    assert [(u.name, u.where, u.calls) for u in trace.kernels()] == [
        ("gemm", "select", 2),
        ("_other_stream", "select", 1),
        ("_select_kernel", "select", 1),
    ]
    times_s = [u.time_s for u in trace.kernels()]
    assert times_s[0] == pytest.approx(15e-6)
    assert by_range(trace.kernels()) == {"select": pytest.approx(sum(times_s))}


def test_a_backward_pass_on_the_same_thread_belongs_to_the_range_of_the_forward_pass() -> None:
    ran = [range_(STEP, 0, 90, 1), range_("whole", 1, 80, 2), range_("part", 2, 20, 3)]
    ran += [op("aten::linear", 3, 9, 4, seq=5), op(f"{BACKWARD}: AddmmBackward0", 30, 60, 5, seq=5)]
    ran += [op("AddmmBackward0", 31, 59, 6, seq=5), op("aten::mm", 32, 50, 7)]
    ran += [launch(40, 1001), kernel("gemm", 52, 60, 7), range_(DRAIN, 90, 99, 8)]

    assert [u.where for u in Trace(ran).kernels()] == ["part"]


def use(name: str, where: str, calls: float, time_s: float) -> Use:
    return Use(name=name, where=where, calls=calls, time_s=time_s)


def test_kernels_of_a_graph_get_the_ranges_that_launch_them_without_it() -> None:
    launched = [use("gemm", "a", 2, 0.03), use("gemm", "b", 1, 0.01), use("add", "a", 4, 0.0)]
    replayed = [use("gemm", "", 3, 0.02), use("add", "", 4, 0.001)]

    shared, how = profile.share_among(launched, replayed)

    named = [("gemm", "a", 2), ("gemm", "b", 1), ("add", "a", 4)]
    assert [(u.name, u.where, u.calls) for u in shared] == named
    assert by_range(shared)["b"] == pytest.approx(0.005)
    assert how == SAME_STEP
    more = [*launched, use("fill", "b", 1, 0.1), use("add", "b", 1, 0.1)]
    shared, how = profile.share_among(more, replayed)
    assert by_range(shared) == pytest.approx({"a": 0.015, "b": 0.005, "": 0.001})
    assert how.endswith("2 that replay otherwise: add, fill")


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_is_profiled_without_its_graph_too(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranges, the replay's times; without memory for both, the replay alone."""
    ran: list[str] = []

    def unreplayed() -> None:
        ran.append("select")
        if not fits:
            raise torch.OutOfMemoryError

    def recorded(_: object) -> list[Event]:
        """The replay's kernel takes 2 us, the launched one 8."""
        steps = [range_(STEP, 0, 20, 1), range_(DRAIN, 20, 21, 2), launch(0, 50)]
        if not ran:
            return [*steps, kernel("add", 1, 3, 1)]
        return [*steps, range_("select", 0, 10, 7), kernel("add", 1, 9, 7)]

    monkeypatch.setattr(profile, "_events", recorded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("profile", "counting"):
        count = StepCount(dispatched_ops=1, host_syncs=0, device_allocations=0)
        monkeypatch.setattr(profile, name, lambda count=count, **_: nullcontext(count))

    found = take(lambda: None, step_s=1.5, unreplayed=unreplayed).profile.breakdown

    assert found is not None
    assert found.kernels_by_range == pytest.approx({"select" if fits else "": 2e-6})
    assert (SAME_STEP if fits else "does not fit the memory") in found.ranges


def test_kernels_of_a_fused_operator_belong_to_the_ranges_within_it() -> None:
    """All kernels of an autograd.Function are linked to it."""
    events = [
        range_(STEP, 0, 80, 1),
        op("Attention", 5, 60, 2),
        range_("compress", 10, 20, 3),
        launch(12, 1001, "cuLaunchKernelEx"),
        kernel("_forward_kernel", 30, 40, 2, by=1001),
        range_("select", 20, 40, 4),
        launch(22, 1002, "cuLaunchKernelEx"),
        kernel("_forward_kernel", 45, 50, 2, by=1002),
        launch(50, 1003, "cuLaunchKernelEx"),
        kernel("_join_kernel", 70, 75, 2, by=1003),
        range_(DRAIN, 80, 100, 5),
    ]

    trace = Trace(events)

    assert {(u.name, u.where) for u in trace.kernels()} == {
        ("_forward_kernel", "compress"),
        ("_forward_kernel", "select"),
        ("_join_kernel", ""),
    }
    assert trace.gap_by_range() == {
        "": pytest.approx(45 / 80),
        "compress": pytest.approx(30 / 80),
        "select": pytest.approx(5 / 80),
    }


def test_the_times_of_a_step_are_divided_by_operator_and_range(trace: Trace) -> None:
    """Overlapping kernels count once; idle time belongs to the range of the next kernel."""
    uses = {(u.name, u.where): u for u in trace.operators()}
    idle, host = trace.gap_by_range(), trace.host_by_range()

    assert uses["aten::bmm", "select"].time_s == pytest.approx((10 - 2 + 6) * 1e-6)
    assert uses["aten::item", ""].calls == 1
    assert not any(name.startswith("autograd::") for name, _ in uses)
    assert trace.busy_s() == pytest.approx((10 + 15 + 5 + 10) * 1e-6)
    assert idle["select"] == pytest.approx((20 + 10 + 5) / 60)  # 0-20, 30-40 and 55-60
    assert idle[""] == pytest.approx((5 + 20) / 60)  # before the copy, and after it
    assert host["select"] == pytest.approx((35 + 10) / 80)
    assert [sum(shares.values()) for shares in (idle, host)] == pytest.approx([1, 1])


def test_communication_is_exposed_while_no_other_kernel_runs(trace: Trace) -> None:
    """The device also works from 20 to 30, 40 to 55, 60 to 65 and 70 to 80."""
    sent = [kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(a)", 25, 50, 0)]
    seen = Trace([*TWO_STEPS, *sent])

    assert trace.communication() == (0.0, 0.0)
    assert seen.communication() == pytest.approx((12.5e-6, 5e-6))  # half of the two steps' sum
    assert seen.busy_s() == pytest.approx(trace.busy_s() + 5e-6)


def test_the_time_of_an_inner_range_is_not_of_the_outer() -> None:
    events = [
        range_(STEP, 0, 100),
        range_(DRAIN, 100, 101),
        range_("outer", 0, 100),
        range_("inner", 20, 50),
        op("aten::add", 30, 31, 5),
        op("aten::mul", 60, 61, 6),
    ]

    seen = Trace(events)

    assert seen.host_by_range() == {"outer": pytest.approx(0.7), "inner": pytest.approx(0.3)}
    where = {u.name: u.where for u in seen.operators()}
    assert where == {"aten::add": "inner", "aten::mul": "outer"}


def test_compiled_code_and_graphs_hide_operators() -> None:
    graph = [range_(STEP, 0, 9), launch(1, 4, "cudaGraphLaunch"), range_(DRAIN, 9, 10)]
    compiled = [range_(STEP, 0, 9), op("Torch-Compiled Region: 0/0", 1, 5, 3), graph[-1]]

    assert Trace(graph).hidden() == ("CUDA graph",)
    assert Trace(graph).counts()["kernel_launches"] == [1]
    assert Trace(compiled).hidden() == ("torch.compile",)


# --- real profiles -----------------------------------------------------------------------


def attend() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with torch.profiler.record_function("select"):
        y = (x @ x).relu()
    y.sum().backward()


def take(run=attend, *, step_s: float = 1e-3, time_left_s: float = 60.0, **k: Any) -> StepProfile:
    ask = profile.ProfileRequest(step_s=step_s, time_left_s=time_left_s, **k)
    return profile.take(run, ask)


@pytest.fixture(scope="module")
def attended() -> StepProfile:
    for _ in range(2):
        attend()
    return take()


def test_a_trace_is_kept_on_request(tmp_path: Path) -> None:
    file = tmp_path / "a.0.trace.json.gz"
    take(trace=str(file))

    assert [*tmp_path.iterdir()] == [file]
    with gzip.open(file) as trace:
        assert "aten::mm" in {event["name"] for event in json.load(trace)["traceEvents"]}


def test_a_real_profile_is_the_same_every_time(attended: StepProfile) -> None:
    again = take()

    assert attended.counters == again.counters
    assert attended.counters.exact
    assert attended.profile.fingerprint == again.profile.fingerprint
    assert attended.counters.dispatched_ops
    assert attended.counters.allocations
    products = [u for u in attended.profile.operators if u.name == "aten::mm"]
    assert {u.where for u in products} == {"select"}
    assert sum(u.calls for u in products) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_kernels_are_unknown(attended: StepProfile) -> None:
    work = attended.profile.breakdown
    assert work
    assert (attended.profile.no_kernels, work.launch_gap) == (profile.NO_GPU, None)
    assert attended.counters.unknown["kernel_launches"] == profile.NO_GPU


def test_another_operator_or_range_changes_the_fingerprint() -> None:
    x = torch.zeros(3)

    def ranged() -> None:
        with torch.profiler.record_function("select"):
            x.sin()

    runs = (lambda: x.sin(), lambda: x.cos(), ranged)

    assert len({take(run).profile.fingerprint for run in runs}) == len(runs)


def test_steps_that_differ_are_not_exact() -> None:
    calls = iter(range(100))

    def varying() -> None:
        for _ in range(1 + next(calls)):
            torch.zeros(3)

    counters = take(varying).counters

    assert not counters.exact
    assert counters.series.keys() == {"dispatched_ops", "allocations"}
    first, *others = counters.series["dispatched_ops"]
    assert others == [first + n for n in range(1, 2 + profile.MORE_STEPS)]


@pytest.mark.parametrize(
    ("step_s", "time_left_s", "steps", "reason"),
    [
        (31.0, 1e6, 0, "one step takes 31 s"),
        (2.0, 10.0, 0, "it may take 20 s, and 10 s are left"),
        (1.5, 60.0, 2, ""),  # one counted, then one profiled
    ],
)
def test_of_a_long_step_little_is_counted(
    step_s: float, time_left_s: float, steps: int, reason: str
) -> None:
    runs: list[int] = []

    ran = take(lambda: runs.append(1), step_s=step_s, time_left_s=time_left_s)

    assert len(runs) == steps
    assert not ran.counters.exact
    assert ran.profile.skipped.startswith(reason)
    assert reason == "" or {*ran.counters.unknown.values()} == {ran.profile.skipped}


@pytest.mark.parametrize(
    ("reason", "limit", "value"),
    [
        ("switched off", "TOO_MANY_OPERATORS", 8),
        ("a step of 9 operators is too large", "TOO_MANY_OPERATORS", 8),
        ("it may take 180 s, and ", "OPERATOR_S", 1.0),
    ],
)
def test_operators_are_counted_without_a_profile(
    reason: str, limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, limit, value)
    x = torch.zeros(3)

    ran = take(lambda: [x.sin() for _ in range(9)], profiling=reason != "switched off")

    assert ran.counters.dispatched_ops == 9
    assert ran.profile.skipped.startswith(reason)
    assert ran.profile.wall_s


@pytest.mark.gpu
def test_on_a_gpu_launches_waits_and_copies_are_exact() -> None:
    x = torch.randn(256, 256, device="cuda")

    def step() -> float:
        with torch.profiler.record_function("select"):
            y = (x @ x).relu()
        return float(y.sum().item())

    step()
    ran = take(step)

    assert not ran.profile.no_kernels
    seen, work = ran.counters, ran.profile.breakdown
    assert seen.exact
    assert (seen.host_syncs, seen.device_waits, seen.host_device_copies) == (1, 1, 1)
    assert (seen.kernel_launches or 0) >= 3
    assert "select" in {u.where for u in ran.profile.kernels}
    assert work
    assert work.kernels_by_range["select"] > 0
    assert work.device_busy_s
    assert 0 < (work.launch_gap or 0) < 1


@pytest.mark.gpu
def test_on_a_gpu_a_graph_is_one_launch_of_named_kernels() -> None:
    x = torch.randn(64, 64, device="cuda")
    torch.mm(x, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ x).relu()

    ran = take(graph.replay)

    seen = ran.counters
    assert (seen.kernel_launches, seen.dispatched_ops, seen.hidden) == (1, 0, ("CUDA graph",))
    assert sum(u.calls for u in ran.profile.kernels) == 2


# --- comparison with the case ------------------------------------------------------------

CASE = Case(case_id="a", workload="a", factory="a:a", provider="a", axes={})


def test_only_a_broken_rule_about_what_was_seen_is_a_mismatch(attended: StepProfile) -> None:
    kept = PathRule(must=("aten::mm",), must_not=("*flash*",))
    broken = PathRule(must=("aten::mm", "*flash*"), must_not=("aten::re*",))
    blind = replace(attended, profile=replace(attended.profile, no_kernels=profile.NO_CUPTI))

    assert mismatch(replace(CASE, operators=kept), attended) == ""
    found = mismatch(replace(CASE, operators=broken), blind)
    assert ("'*flash*'" in found, "'aten::relu'" in found) == (True, True)
    assert mismatch(replace(CASE, kernels=broken), blind) == ""
    assert mismatch(replace(CASE, operators=broken), profile.without_profile("off")) == ""
