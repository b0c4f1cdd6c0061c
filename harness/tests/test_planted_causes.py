"""Each planted cause is named first, and nothing innocent beside it.

A healthy record is damaged in one way at a time, as the fault would show on an H200.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import records as r
from harness.analysis.causes import CauseKind, causes
from harness.analysis.study import Study
from harness.report.remedies import evidence
from harness.runner.launcher import Launcher
from harness.tests import faulty, workers
from harness.tests.fake_runs import ended, environment, run, sweep, taking, timed, trained
from harness.tests.workers import QUICK, make_case

PEAKS = r.Peaks(bytes_per_s=4e12, flops_per_s={"bf16": 8e14}, launch_s=3e-6, sync_s=2e-5)
FULL_HZ = 1.98e9
CASES = sweep(seq_len=[512, 1024, 2048, 4096], NSA_FA2=[0, 1])
GC = sweep(seq_len=[512, 1024, 2048, 4096], gc=["off", "on"])
RANGES = {"nsa.select": 0.5, "nsa.window": 0.2, "nsa.compress": 0.27}
"""Range -> its share of a healthy step; the GPU works for 97 % of it."""

Damage = Callable[[r.Case, r.Measurement], r.Measurement]


def step_s(c: r.Case) -> float:
    """20 ms at 512 tokens, and linear; FA2 saves a tenth, checkpointing costs one."""
    other = 0.9 if c.axes.get("NSA_FA2") else 1.1 if c.axes.get("gc") == "on" else 1.0
    return 0.02 * int(c.axes["seq_len"]) / 512 * other


def profile(step: float) -> r.Profile:
    parts = {name: part * step for name, part in RANGES.items()}
    kernels = tuple(r.Use(name="gemm", where=n, calls=9, time_s=s) for n, s in parts.items())
    busy_s = sum(parts.values())
    work = r.Breakdown(step_s=step, device_busy_s=busy_s)
    return r.Profile(kernels=kernels, breakdown=work, fingerprint="ab", steps=2)


def counted(**changes: Any) -> r.Counters:
    known = {"dispatched_ops": 900, "host_syncs": 0, "kernel_launches": 300, "steps": 2}
    return r.Counters(**(known | changes))


def healthy(c: r.Case) -> list[r.Measurement]:
    index = [*CASES, *GC].index(c)
    step, length = step_s(c), int(c.axes["seq_len"])
    digest = r.TensorDigest(
        name="loss", dtype="float32", shape=(1,), norm=1.0 + index, projection=1.0 + index
    )
    return timed(
        c,
        step,
        telemetry={"gpu_utilisation": 0.97},
        profile=profile(step),
        counters=counted(dispatched_ops=900 + index),
        output_digest=(digest,),
        flags_read={"NSA_FA2": True},
        flops=int(5e8 * length * (1 + length / 8192)),  # a token costs more in a longer row
    )


def channel(m: r.Measurement, name: str, values: Callable[[float], float]) -> r.Measurement:
    """With a channel whose readings depend on the share of the sampling that has passed."""
    assert m.telemetry is not None
    sampling = m.phases[-1]
    span = sampling.end_s - sampling.start_s
    read = tuple(values(max(0.0, (t - sampling.start_s) / span)) for t in m.telemetry.t_s)
    return replace(m, telemetry=replace(m.telemetry, channels={**m.telemetry.channels, name: read}))


def planted(damage: Damage, cases: Sequence[r.Case] = CASES, **suite: Any) -> r.Run:
    def measure(c: r.Case) -> list[r.Measurement]:
        return [damage(c, m) for m in healthy(c)]

    tests = (r.SelfTest(at="2026-11-21T07:30:12+00:00", device="GPU-5d1e", peaks=PEAKS),)
    return run(cases, measure, self_tests=tests, **suite)


def kinds(recorded: r.Run) -> list[CauseKind]:
    return [c.kind for c in causes(Study(recorded)) if evidence(c)]


# --- the damages -------------------------------------------------------------------------


def profiled(m: r.Measurement, *more: r.Use, times: float = 1.0, **where: Any) -> r.Profile:
    """Its profile, with kernels that take so many times as long, and more of them."""
    assert m.profile is not None
    assert m.profile.breakdown is not None
    kernels = (*more, *(replace(u, time_s=u.time_s * times) for u in m.profile.kernels))
    busy_s = sum(u.time_s for u in kernels)
    work = replace(m.profile.breakdown, device_busy_s=busy_s, **where)
    return replace(m.profile, kernels=kernels, breakdown=work)


def slower(m: r.Measurement, by: float, **changes: Any) -> r.Measurement:
    """Every sample and kernel takes so many times as long."""
    seen = {"profile": profiled(m, times=by)}
    return replace(m, samples_s=tuple(s * by for s in m.samples_s), **(seen | changes))


def waiting(
    m: r.Measurement, by: float, counters: r.Counters | None = None, **where: Any
) -> r.Measurement:
    """A step that is longer by this factor because the GPU waits."""
    return slower(m, by, profile=profiled(m, **where), counters=counters or m.counters)


def sync_per_token(c: r.Case, m: r.Measurement) -> r.Measurement:
    tokens = int(c.axes["seq_len"])
    return waiting(m, 2.0, counted(host_syncs=2 * tokens), host_by_range={"": 1.0})


def slow_loader(c: r.Case, m: r.Measurement) -> r.Measurement:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return waiting(m, 2.0, gap_by_range={"": 1.0}, host_by_range={loader: 0.9, "": 0.1})


def small_batch(c: r.Case, m: r.Measurement) -> r.Measurement:
    launches = int(m.kept_s[0] * 1.5 / PEAKS.launch_s)  # type: ignore[operator]
    return waiting(m, 3.0, counted(kernel_launches=launches))


def many_operators(c: r.Case, m: r.Measurement) -> r.Measurement:
    return waiting(m, 2.0, counted(dispatched_ops=round(step_s(c) * 2.0 / 12e-6)))


def slow_network(c: r.Case, m: r.Measurement) -> r.Measurement:
    reduce = r.Use(name="ncclDevKernel_AllReduce_Sum_bf16", calls=1, time_s=m.kept_s[0])
    return slower(m, 2.0, profile=profiled(m, reduce))


def slow_rank(c: r.Case, m: r.Measurement) -> r.Measurement:
    each = {f"rank{i}_compute": (s,) * 20 for i, s in enumerate((0.02, 0.02, 0.02, 0.04))}
    return replace(slow_network(c, m), readings=each)


def fallback(c: r.Case, m: r.Measurement) -> r.Measurement:
    """FA2 does what the other value does."""
    twin = next(x for x in CASES if {**x.axes, "NSA_FA2": 1} == {**c.axes, "NSA_FA2": 1})
    return replace(healthy(twin)[m.process], case_id=c.case_id, effective=m.effective)


def checkpointing(c: r.Case, m: r.Measurement) -> r.Measurement:
    return slower(m, 1.3) if c.axes["gc"] == "on" else m


def swapped(c: r.Case, m: r.Measurement) -> r.Measurement:
    other = {"on": "off", "off": "on"}[str(c.axes["gc"])]
    return replace(m, effective={**m.effective, "gc": other})


def limited(mask: int, clock: float) -> Damage:
    def damage(c: r.Case, m: r.Measurement) -> r.Measurement:
        hot = channel(m, "gpu_throttle_reasons", lambda _: mask)
        return slower(channel(hot, "gpu_sm_clock_hz", lambda _: clock * FULL_HZ), 1 / clock)

    return damage


def rarely_limited(c: r.Case, m: r.Measurement) -> r.Measurement:
    """Somebody locked the clock; the power limit is in force now and then."""
    m = channel(m, "gpu_throttle_reasons", lambda at: 0x4 if at < 0.3 else 0x0)
    return slower(channel(m, "gpu_sm_clock_hz", lambda _: 0.8 * FULL_HZ), 1.25)


def shared(c: r.Case, m: r.Measurement) -> r.Measurement:
    """The neighbour is gone when the profile is taken."""
    m = channel(m, "gpu_foreign_processes", lambda at: float(at > 0.3))
    return replace(m, samples_s=tuple(s * 1.5 for s in m.samples_s))


def occupied(c: r.Case, m: r.Measurement) -> r.Measurement:
    seen = r.Evidence(holders=("python (pid 7)",))
    (made,) = ended(c, r.Outcome.INVALID_ENVIRONMENT, evidence=seen, process=m.process)
    return made


def cold(c: r.Case, m: r.Measurement) -> r.Measurement:
    falling = tuple(s * (3 - 2 * i / 20) for i, s in enumerate(m.samples_s))
    return replace(m, samples_s=falling, steady=False)


def leak(c: r.Case, m: r.Measurement) -> r.Measurement:
    return channel(m, "gpu_memory_bytes", lambda at: (8 + 4 * at) * 2**30)


def leaks_a_little(c: r.Case, m: r.Measurement) -> r.Measurement:
    """1 MiB a step is 2.4 % of the memory after 200 steps."""
    return trained(m, memory_bytes=lambda n: 8 * 2**30 + n * 2**20)


def steady_training(c: r.Case, m: r.Measurement) -> r.Measurement:
    """Compiles at first, fills a cache at once, and steps vary."""
    return trained(
        m,
        pace=lambda n: 100.0 if n <= 2 else 1.0 + 0.3 * (n % 10 == 0),
        memory_bytes=lambda n: (9 if n > 90 else 8) * 2**30,
    )


def overflow(c: r.Case, m: r.Measurement) -> r.Measurement:
    origins = (
        r.NonFiniteOrigin(
            computation="run", precision="float16", value="Inf", tensor="output 0 of aten.mm"
        ),
        r.NonFiniteOrigin(computation="reference", precision="float64"),
    )
    seen = r.Evidence(origins=origins)
    (made,) = ended(c, r.Outcome.NON_FINITE, evidence=seen, process=m.process)
    return made


def interaction(c: r.Case, m: r.Measurement) -> r.Measurement:
    """Checkpointing helps the shortest rows: no single cell is to blame."""
    return slower(m, 0.7) if (c.axes["seq_len"], c.axes["gc"]) == (512, "on") else m


def forward_only(c: r.Case, m: r.Measurement) -> r.Measurement:
    """What is off here does a third of the work."""
    on = c.axes["gc"] == "on"
    return slower(replace(m, flops=3 * (m.flops or 0)), 3.0) if on else m


def nothing(c: r.Case, m: r.Measurement) -> r.Measurement:
    return m


def busy_node(c: r.Case, m: r.Measurement) -> r.Measurement:
    """At the power limit with its clock kept, a cache that fills once, one blip of a neighbour."""
    m = channel(m, "gpu_throttle_reasons", lambda _: 0x4)
    m = channel(m, "gpu_sm_clock_hz", lambda _: 0.96 * FULL_HZ)
    m = channel(m, "gpu_foreign_processes", lambda at: float(0.5 < at < 0.53))
    m = channel(m, "gpu_memory_bytes", lambda at: (12 if at > 0.6 else 8) * 2**30)
    effective = {**m.effective, "precision": "torch.bfloat16", "seq_len": c.axes["seq_len"]}
    return replace(m, effective=effective, readings={"rank0_s": (1.0,), "rank1_s": (1.02,)})


@pytest.mark.parametrize(
    ("damage", "cases", "cause"),
    [
        (sync_per_token, CASES, CauseKind.SYNCS),
        (slow_loader, CASES, CauseKind.DATA),
        (small_batch, CASES, CauseKind.LAUNCHES),
        (lambda _, m: waiting(m, 2.0), CASES, CauseKind.HOST),
        (many_operators, CASES, CauseKind.DISPATCH),
        (slow_network, CASES, CauseKind.COMMUNICATION),
        (slow_rank, CASES, CauseKind.RANKS),
        (fallback, CASES, CauseKind.FALLBACK),
        (lambda *of: replace(fallback(*of), flags_read={"NSA_FA2": False}), CASES, CauseKind.DEAD),
        (checkpointing, GC, CauseKind.SETTING),
        (swapped, GC, CauseKind.CONFIGURATION),
        (limited(0x4, 0.7), CASES, CauseKind.POWER),
        (limited(0x20, 0.7), CASES, CauseKind.THERMAL),
        (shared, CASES, CauseKind.SHARED),
        (occupied, CASES, CauseKind.SHARED),
        (cold, CASES, CauseKind.COLD),
        (lambda *of: replace(cold(*of), warmup_s=(0.001,)), CASES, CauseKind.HOST),  # it was warm
        (leak, CASES, CauseKind.LEAK),
        (leaks_a_little, CASES, CauseKind.LEAK),
        (lambda _, m: trained(m, pace=lambda n: 1 + n / 200), CASES, CauseKind.SINKING),
        (lambda _, m: trained(m, pace=lambda n: 1 + 0.3 * (n > 120)), CASES, CauseKind.SINKING),
        (lambda _, m: trained(m, pace=lambda n: 1 + 6 * (n == 120)), CASES, CauseKind.SLOW_STEPS),
        (steady_training, CASES, None),
        (overflow, CASES, CauseKind.OVERFLOW),
        (lambda _, m: replace(m, effective={"timed_share": 0.05}), CASES, CauseKind.UNTIMED),
        (lambda _, m: replace(m, effective={"raised": "KeyError"}), CASES, CauseKind.RAISED),
        (nothing, CASES, None),
        (nothing, GC, None),
        (busy_node, CASES, None),
        (forward_only, GC, None),
        (rarely_limited, CASES, None),
        (interaction, GC, None),
    ],
)
def test_a_planted_cause_is_the_only_one_named(
    damage: Damage, cases: Sequence[r.Case], cause: CauseKind | None
) -> None:
    assert kinds(planted(damage, cases)) == ([cause] if cause else [])
    assert {*kinds(planted(damage, cases, peers=("nsa",)))} <= {CauseKind.UNTIMED, CauseKind.RAISED}


def test_operators_that_do_not_add_up_to_the_step_are_not_the_mechanism() -> None:
    def damage(c: r.Case, m: r.Measurement) -> r.Measurement:
        m = many_operators(c, m)
        return replace(m, counters=counted(dispatched_ops=1111)) if c is CASES[0] else m

    wrong, right = causes(Study(planted(damage)))

    assert (wrong.kind, wrong.cases) == (CauseKind.HOST, (CASES[0].case_id,))
    assert evidence(wrong).startswith("1,111 operators x 12.0 µs = 13.3 ms, 33.2 % of the step of")
    assert (right.kind, right.cases) == (CauseKind.DISPATCH, tuple(c.case_id for c in CASES[1:]))
    assert ", 101 % of the step of 35.7 ms: dispatch in Python alone would fill" in evidence(right)


def test_a_setting_that_changes_the_tokens_of_a_step_makes_a_token_slower() -> None:
    """A step of twice the rows takes longer; one of its tokens takes half as long."""
    cases = sweep(seq_len=[512, 1024], BATCH=[8, 16])

    def measure(c: r.Case) -> list[r.Measurement]:
        rows, length = int(c.axes["BATCH"]), int(c.axes["seq_len"])
        again = 9.0 if rows == 8 and length == 1024 else 0.0  # processes that do not agree
        return taking(c, *(0.02 * (1 + again * p) for p in range(3)), tokens=rows * length)

    (cause,) = causes(Study(run(cases, measure)))

    assert evidence(cause).startswith("BATCH=8 is 2.0x slower than BATCH=16 (1 pair of")
    assert cause.cases == (cases[0].case_id,), "without a speed a case shows no cause"


def test_what_spoils_numbers_is_first_then_what_costs_most() -> None:
    def both(first: float, second: float) -> list[CauseKind]:
        """A step that waits so many times its work, and checkpointing at its price; with a leak."""

        def damage(c: r.Case, m: r.Measurement) -> r.Measurement:
            seen = waiting(leak(c, m), first)
            return slower(seen, second) if c.axes["gc"] == "on" else seen

        return kinds(planted(damage, GC))

    assert both(2.0, 1.3) == [CauseKind.LEAK, CauseKind.HOST, CauseKind.SETTING]
    assert both(1.4, 3.0) == [CauseKind.LEAK, CauseKind.SETTING, CauseKind.HOST]


# --- of real processes, without a GPU ----------------------------------------------------


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        (make_case("good", axes={"dtype": "float32"}), None),
        (make_case("good", axes={"dtype": "float16"}), CauseKind.CONFIGURATION),
        (make_case("reads_a_flag", env={"NSA_READ": "1"}), None),
        (make_case("reads_a_flag", env={"NSA_UNREAD": "1"}), CauseKind.DEAD),
        (faulty.make_case("overflows_float16"), CauseKind.OVERFLOW),
        (
            replace(
                make_case("multiplies", settings=replace(QUICK, profile=True)),
                operators=r.PathRule(must=("aten::flash*",)),
            ),
            CauseKind.FALLBACK,
        ),
    ],
)
def test_a_fault_of_a_real_process_is_named(
    warm: Launcher, tmp_path: Path, case: r.Case, cause: CauseKind | None
) -> None:
    measured = workers.run(warm, tmp_path, case)
    recorded = run([case], lambda _: measured, env=environment(gpu=None))

    assert kinds(recorded) == ([cause] if cause else [])
