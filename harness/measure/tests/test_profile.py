"""What ran, and where the time went: from events made by hand, as a GPU's profile has them, and
from real profiles on whatever is here."""

import time
from dataclasses import replace

import pytest
import torch

from harness.analysis import counters as counts
from harness.measure import host_stacks
from harness.measure import profile as census
from harness.measure.attestation import PathMismatch, attest
from harness.measure.profile_events import DRAIN, STEP, Event, EventKind, Trace
from harness.records import Case, Counters, Measurement, MeasureSettings, Outcome, PathRule, Use

MAIN, ENGINE, DEVICE = 1, 2, 7
US = 1000
BACKWARD = "autograd::engine::evaluate_function"


def op(name: str, start: int, end: int, number: int, *, thread: int = MAIN, seq: int = -1) -> Event:
    return Event(EventKind.OPERATOR, name, start * US, end * US, thread, number, sequence=seq)


def range_(name: str, start: int, end: int, number: int = 0, *, thread: int = MAIN) -> Event:
    return Event(EventKind.RANGE, name, start * US, end * US, thread, number)


def launch(at: int, number: int, name: str = "cudaLaunchKernel") -> Event:
    return Event(EventKind.RUNTIME, name, at * US, (at + 2) * US, MAIN, number)


def kernel(
    name: str,
    start: int,
    end: int,
    link: int,
    kind: EventKind = EventKind.KERNEL,
    launched_by: int = 0,
) -> Event:
    return Event(kind, name, start * US, end * US, DEVICE, launched_by, link)


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
        kernel("Memcpy DtoH (Device -> Pinned)", 70, 80, i + 6, EventKind.COPY),
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


@pytest.fixture
def profile() -> Trace:
    return Trace([*reversed(one_step()), *one_step(1000, 200)])


def test_each_step_is_counted_by_itself(profile: Trace) -> None:
    first, second = profile.counts()

    assert first == second
    assert first.kernel_launches == 3
    assert first.device_waits == 1  # ours after the step is none of its
    assert first.host_device_copies == 1


def test_a_step_that_launches_more_shows() -> None:
    more = launch(1020, 5000)

    first, second = Trace([*one_step(), *one_step(1000, 200), more]).counts()

    assert second.kernel_launches == first.kernel_launches + 1


def test_kernels_belong_to_ranges_those_of_gradients_too(profile: Trace) -> None:
    assert [(u.name, u.where, u.calls) for u in profile.kernels()] == [
        ("gemm", "select", 2),
        ("_other_stream", "select", 1),
        ("_select_kernel", "select", 1),
    ]
    assert profile.kernels()[0].time_s == pytest.approx(15e-6)


def test_kernels_of_a_fused_operator_belong_to_the_ranges_within_it() -> None:
    """As an autograd.Function that launches Triton's kernels has them: all linked to itself."""
    events = [
        range_(STEP, 0, 80, 1),
        op("Attention", 5, 60, 2),
        range_("compress", 10, 20, 3),
        launch(12, 1001, "cuLaunchKernelEx"),
        kernel("_forward_kernel", 30, 40, 2, launched_by=1001),
        range_("select", 20, 40, 4),
        launch(22, 1002, "cuLaunchKernelEx"),
        kernel("_forward_kernel", 45, 50, 2, launched_by=1002),
        launch(50, 1003, "cuLaunchKernelEx"),
        kernel("_join_kernel", 70, 75, 2, launched_by=1003),
        range_(DRAIN, 80, 100, 5),
    ]

    profile = Trace(events)

    assert {(u.name, u.where) for u in profile.kernels()} == {
        ("_forward_kernel", "compress"),
        ("_forward_kernel", "select"),
        ("_join_kernel", ""),
    }
    assert profile.gap_by_range() == {
        "": pytest.approx(45 / 80),
        "compress": pytest.approx(30 / 80),
        "select": pytest.approx(5 / 80),
    }


def test_an_operators_own_time_is_without_what_it_calls(profile: Trace) -> None:
    uses = {(u.name, u.where): u for u in profile.operators()}

    assert uses["aten::bmm", "select"].time_s == pytest.approx((10 - 2 + 6) * 1e-6)
    assert uses["aten::item", ""].calls == 1
    assert not any(name.startswith("autograd::") for name, _ in uses)


def test_busy_time_counts_what_overlaps_once(profile: Trace) -> None:
    assert profile.step_s == pytest.approx(100e-6)
    assert profile.busy_s() == pytest.approx((10 + 15 + 5 + 10) * 1e-6)


def test_idle_time_belongs_to_the_range_that_ended_it(profile: Trace) -> None:
    idle = profile.gap_by_range()

    assert sum(idle.values()) == pytest.approx(1)
    assert idle["select"] == pytest.approx((20 + 10 + 5) / 60)  # 0-20, 30-40 and 55-60
    assert idle[""] == pytest.approx((5 + 20) / 60)  # before the copy, and after it


def test_the_hosts_time_is_shared_out_by_range(profile: Trace) -> None:
    host = profile.host_by_range()

    assert host["select"] == pytest.approx((35 + 10) / 80)
    assert sum(host.values()) == pytest.approx(1)


def test_a_range_inside_a_range_takes_its_time_from_it() -> None:
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
    assert {u.name: u.where for u in seen.operators()} == {
        "aten::add": "inner",
        "aten::mul": "outer",
    }
    assert [seen.range_at(t * US) for t in (10, 30, 55, 200)] == ["outer", "inner", "outer", ""]


def test_what_hides_operators_is_said() -> None:
    graph = [range_(STEP, 0, 9), launch(1, 4, "cudaGraphLaunch"), range_(DRAIN, 9, 10)]
    compiled = [range_(STEP, 0, 9), op("Torch-Compiled Region: 0/0", 1, 5, 3)]

    assert Trace(graph).hidden() == ("CUDA graph",)
    assert Trace(graph).counts()[0].kernel_launches == 1
    assert Trace(compiled).hidden() == ("torch.compile",)


# --- real profiles -----------------------------------------------------------------------


def attend() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with torch.profiler.record_function("select"):
        y = (x @ x).relu()
    y.sum().backward()


def take(run=attend, *, step_s: float = 1e-3, time_left_s: float = 60.0) -> census.WhatRan:
    return census.take(run, step_s=step_s, time_left_s=time_left_s)


def test_a_real_pass_counts_the_same_every_time() -> None:
    for _ in range(2):
        attend()

    one, two = take(), take()

    assert one.counters == two.counters
    assert one.counters.exact
    assert one.census.fingerprint == two.census.fingerprint
    assert one.counters.dispatched_ops
    assert one.counters.allocations
    assert {u.where for u in one.census.operators if u.name == "aten::mm"} == {"select"}
    assert sum(u.calls for u in one.census.operators if u.name == "aten::mm") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_said_of_kernels() -> None:
    ran = take()

    assert ran.census.no_kernels == "no GPU"
    assert ran.counters.kernel_launches is None
    assert ran.counters.unknown["kernel_launches"] == "no GPU"
    assert ran.census.breakdown
    assert ran.census.breakdown.launch_gap is None


def test_another_operator_or_range_is_another_fingerprint() -> None:
    x = torch.zeros(3)

    def ranged() -> None:
        with torch.profiler.record_function("select"):
            x.sin()

    runs = (lambda: x.sin(), lambda: x.cos(), ranged)

    assert len({take(run).census.fingerprint for run in runs}) == len(runs)


def test_steps_that_differ_are_not_exact() -> None:
    calls = iter(range(100))

    def varying() -> None:
        for _ in range(1 + next(calls)):
            torch.zeros(3)

    counters = take(varying).counters

    assert not counters.exact
    assert set(counters.differing) == {"dispatched_ops", "allocations"}


@pytest.mark.parametrize(
    ("step_s", "time_left_s", "why"),
    [
        (31.0, 1e6, "one step takes 31 s, over 30 s"),
        (2.0, 10.0, "it may take 16 s, and 10 s are left until timeout_s"),
        (0.5, -3.0, "it may take 8 s, and 0 s are left until timeout_s"),
    ],
)
def test_a_pass_that_would_not_fit_is_left_out_with_the_reason(
    step_s: float, time_left_s: float, why: str
) -> None:
    runs: list[int] = []

    ran = take(lambda: runs.append(1), step_s=step_s, time_left_s=time_left_s)

    assert runs == []
    assert ran.census.skipped == why
    assert set(ran.counters.unknown.values()) == {why}


def test_a_long_step_runs_twice_and_is_not_called_exact() -> None:
    runs: list[int] = []

    ran = take(lambda: runs.append(1), step_s=1.5)

    assert len(runs) == 2  # counted, then profiled
    assert not ran.counters.exact


def test_the_pass_can_be_switched_off_and_still_counts() -> None:
    ran = census.take(attend, step_s=1e-3, time_left_s=9.0, profiling=False)

    assert ran.counters.dispatched_ops
    assert ran.census.skipped == "switched off (measure.census)"


def linger(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_function_that_keeps_the_host_is_named() -> None:
    with host_stacks.looking(expected_s=0.1) as looks:
        linger(0.1)

    ((function, _, share), *_) = host_stacks.summarise([(s, "") for s in looks.spots], 3)
    assert function.startswith("tests/test_profile.py:")
    assert function.endswith(" linger")
    assert share > 0.5  # on a busy machine the end of the block takes its part


def test_generated_code_is_named_for_what_it_is() -> None:
    generated = f"/cache/u7/c{'u7kwhzqp3z' * 5}2.py"

    labels = [
        host_stacks.summarise([((file, "call", 739), "")], 1)[0][0]
        for file in (generated, "/cache/u7/compiled.py")
    ]

    assert labels == ["torch.compile's code:739 call", "u7/compiled.py:739 call"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_launches_waits_and_copies_are_exact() -> None:
    x = torch.randn(256, 256, device="cuda")

    def step() -> float:
        with torch.profiler.record_function("select"):
            y = (x @ x).relu()
        return float(y.sum().item())

    step()
    ran = take(step)

    assert not ran.census.no_kernels
    assert ran.counters.exact
    assert ran.counters.host_syncs == 1
    assert ran.counters.device_waits == 1
    assert ran.counters.host_device_copies == 1
    assert ran.counters.kernel_launches
    assert ran.counters.kernel_launches >= 3
    assert "select" in {u.where for u in ran.census.kernels}
    assert ran.census.breakdown
    assert ran.census.breakdown.device_busy_s
    assert 0 < (ran.census.breakdown.launch_gap or 0) < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_a_graph_is_one_launch_of_kernels_that_show() -> None:
    x = torch.randn(64, 64, device="cuda")
    torch.mm(x, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ x).relu()

    ran = take(graph.replay)

    assert ran.counters.kernel_launches == 1
    assert ran.counters.dispatched_ops == 0
    assert ran.counters.hidden == ("CUDA graph",)
    assert sum(u.calls for u in ran.census.kernels) == 2


# --- asked against seen ------------------------------------------------------------------

CASE = Case(case_id="a", workload="a", factory="a:a", provider="a", axes={})


def attested(case: Case) -> census.WhatRan:
    return attest(case, attend, step_s=1e-3, time_left_s=60.0, effective={"dtype": "fp32"})


def test_what_must_run_and_did_not_is_a_mismatch_with_what_was_seen() -> None:
    stated = replace(
        CASE, operators=PathRule(must=("aten::mm", "*flash*"), must_not=("aten::re*",))
    )

    with pytest.raises(PathMismatch) as caught:
        attested(stated)

    assert "nothing that ran fits '*flash*', which must run" in str(caught.value)
    assert "'aten::relu' ran, and 'aten::re*' must not" in str(caught.value)
    assert "seen: " in str(caught.value)
    assert caught.value.seen["census"].operators
    assert caught.value.seen["effective"] == {"dtype": "fp32"}


def test_what_holds_passes() -> None:
    ran = attested(replace(CASE, operators=PathRule(must=("aten::mm",), must_not=("*flash*",))))

    assert "aten::mm" in ran.operators


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_are_not_attested_without_a_gpu() -> None:
    stated = replace(CASE, kernels=PathRule(must=("nothing_of_this_name",)))
    ran = attested(stated)
    measured = Measurement(
        case_id="a",
        process=0,
        outcome=Outcome.OK,
        samples_s=(1.0,),
        counters=ran.counters,
        census=ran.census,
    )

    assert counts.unattested(stated, [measured], gpu=True) == "no GPU"
    assert counts.unattested(stated, [measured], gpu=False) == "", "there is nothing to see"


def test_an_unseen_case_is_not_attested() -> None:
    stated = replace(CASE, operators=PathRule(must=("x",)), settings=MeasureSettings(census=False))
    measured = Measurement(case_id="a", process=0, outcome=Outcome.OK, samples_s=(1.0,))
    skipped = replace(measured, census=attested(stated).census)

    for gpu in (True, False):
        unseen = (counts.unattested(stated, [m], gpu=gpu) for m in (measured, skipped))
        assert [*unseen] == ["no profile was taken", "switched off (measure.census)"]
        assert counts.unattested(CASE, [measured], gpu=gpu) == ""


# --- counters as metrics -----------------------------------------------------------------


def counted(process: int = 0, **changes: object) -> Measurement:
    known = {"dispatched_ops": 12, "host_syncs": 0, "steps": 2}
    return Measurement(
        case_id="a",
        process=process,
        outcome=Outcome.OK,
        samples_s=(1.0,),
        counters=Counters(**{**known, **changes}),  # type: ignore[arg-type]
    )


def test_a_count_has_an_interval_of_no_width_from_one_process() -> None:
    found = counts.estimates([counted(unknown={"kernel_launches": "no GPU"})])

    assert found["dispatched_ops"].low == found["dispatched_ops"].high == 12
    assert found["host_syncs"].value == 0
    assert "kernel_launches" not in found


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"dispatched_ops": 13}, "processes counted differently"),
        ({"differing": ("dispatched_ops",)}, "two steps counted differently"),
        ({"steps": 1}, "only 1 step was counted; 2 are needed"),
    ],
)
def test_a_count_that_is_not_exact_is_absent(second: dict[str, object], why: str) -> None:
    ok = [counted(), counted(1, **second)]

    assert "dispatched_ops" not in counts.estimates(ok)
    assert counts.exact_counters(ok).absent["dispatched_ops"] == why


def test_a_disagreement_is_a_note() -> None:
    (note,) = counts.disagreements([counted(), counted(1, dispatched_ops=1300)])

    assert note.startswith("operators per step differ between processes")


def test_names_of_kernels_keep_their_beginning() -> None:
    (use,) = Trace([*one_step()[:1], kernel("k" * 1000, 10, 20, 0)]).kernels()

    assert isinstance(use, Use)
    assert len(use.name) == 160
