"""What a page says of a cause, and the command that removes it."""

from dataclasses import replace

import pytest

from harness.analysis.causes import Cause, CauseKind, causes
from harness.analysis.study import Study
from harness.records import Breakdown, Case, Measurement, Profile, Rule, Use
from harness.report import remedies
from harness.report.tests.test_report import values
from harness.tests import test_planted_causes as planted
from harness.tests.fake_runs import case, run, timed, to

SUITE, FIRST = "harness run suites/retest.yaml", "train/nsa/seq_len=512"


@pytest.mark.parametrize(
    ("damage", "cases", "step"),
    [
        (
            planted.sync_per_token,
            planted.CASES,
            "Read no value from the GPU within a step: `harness run",
        ),
        (planted.checkpointing, planted.GC, f"Set `gc=off`: `{SUITE} -f {FIRST}/gc=off`"),
        (planted.shared, planted.CASES, "--wait-for-gpu 600`"),
    ],
)
def test_a_cause_has_its_command_and_what_it_saves(
    damage: planted.Damage, cases: list[Case], step: str
) -> None:
    built = values(planted.planted(damage, cases))

    assert step in built["next_steps"][0]
    assert built["causes"].rows[0][0] in f"{built['lines']}{built['why']}"


def steps(damage: planted.Damage, go: float = 1.0, gc: str = "on", ran: int = 3) -> tuple[str, ...]:
    """What a run asks for that has one rule, on the cases with this checkpointing."""
    rules = (
        Rule(name="floor", metric="tokens_per_s", go=go, match=to(gc=gc)),
        Rule(name="all", metric="tokens_per_s", go=1.0),
    )
    made = planted.planted(damage, planted.GC, rules=rules)
    of = Study(replace(made, measurements=tuple(m for m in made.measurements if m.process < ran)))
    return tuple(remedies.next_steps(of.verdict, of, causes(of)))


def test_a_go_asks_for_no_speed_but_for_sound_numbers() -> None:
    assert steps(planted.checkpointing) == ()
    assert steps(planted.checkpointing, go=1e9)[-1].startswith("Set `gc=off`")
    assert "Set" not in str(steps(planted.checkpointing, go=1e9, gc="off"))
    assert len(steps(planted.leak)) == 1
    missing = steps(planted.checkpointing, ran=2)
    assert missing
    assert "Set" not in str(missing)


@pytest.mark.parametrize("kind", CauseKind)
def test_every_cause_has_a_remedy(kind: CauseKind) -> None:
    recorded = planted.planted(planted.nothing)
    one = Cause(kind, planted.CASES[0].case_id, {}, 0.5)

    known = "" if kind is CauseKind.HOST else "; gain at most 2.0x"
    assert remedies.remedy(one, recorded).endswith(f"`{known}")
    assert "gain at" not in remedies.remedy(replace(one, share=None), recorded)


@pytest.mark.parametrize("named", [True, False])
def test_the_case_that_misses_its_rule_and_its_baseline_have_their_parts_shown(named: bool) -> None:
    def measure(c: Case) -> list[Measurement]:
        parts = {"select": 0.06, "feed forward": 0.04, "loss": 0.02}
        if c.provider == "dense":
            parts = {"attention": 0.02, "feed forward": 0.04, "loss": 0.01}
            parts = parts if named else {"attention": 0.07}
        busy_s = sum(parts.values())
        step_s = busy_s + 0.03
        uses = (Use(name=n, where=f"nsa.{n}", calls=1, time_s=t) for n, t in parts.items())
        took = Breakdown(step_s=step_s, device_busy_s=busy_s)
        return timed(c, step_s, cv=0, profile=Profile(kernels=tuple(uses), breakdown=took))

    both = [case({"seq_len": 512}, provider=p) for p in ("nsa", "dense")]
    both.append(case({"seq_len": 4096}, provider="dense"))
    ours, theirs = to(provider="nsa"), to(provider="dense")
    rule = Rule(name="faster", metric="step_s", go=1.0, match=ours, against=theirs)
    made = run(both, measure, rules=(rule,))

    assert remedies.slowest(Study(made).verdict) == tuple(c.case_id for c in both[:2])
    beside = values(made)["where"].columns[2:3]
    assert [*beside] == [">dense, seq_len=512"][: int(named)]


@pytest.mark.parametrize(
    ("their_clock", "asked", "named"),
    [(1.0, "pair", True), (0.5, "pair", False), (0.5, "floor", True), (0.5, "floor, pair", True)],
)
def test_what_limits_the_baseline_as_much_is_no_cause_of_ours(
    their_clock: float, asked: str, named: bool
) -> None:
    def damage(c: Case, m: Measurement) -> Measurement:
        clock = 0.7 if c.axes["gc"] == "on" else their_clock
        return planted.limited(0x4, clock)(c, m)

    ours, theirs = to(gc="on"), to(gc="off")
    floor = Rule(name="floor", metric="tokens_per_s", go=1e9, match=ours)
    pair = Rule(name="pair", metric="step_s", go=4.0, match=ours, against=theirs)
    rules = tuple(rule for rule in (floor, pair) if rule.name in asked)
    made = planted.planted(damage, planted.GC[:2], rules=rules)
    of = Study(made)

    found = remedies.relevant(causes(of), of.verdict)

    judged = 2 if "pair" in asked else 1
    limited = judged if their_clock < 1 else 1
    cases = "case" if judged == 1 else "cases"
    assert (
        f"of {judged} {cases} behind the answers: {limited} clock limited" in values(made)["trust"]
    )
    limits = [c for c in found if c.kind is CauseKind.POWER]
    assert bool(limits) == named
    for cause in limits:
        assert cause.cases == ("train/nsa/seq_len=512/gc=on",)
        assert cause.share == pytest.approx(0.3)
        assert "1,390 of 1,980 MHz" in remedies.evidence(cause)


@pytest.mark.parametrize(("go", "named"), [(0.1, False), (4.0, True)])
def test_a_case_that_is_fast_enough_in_one_process_needs_no_more_speed(
    go: float, named: bool
) -> None:
    """It needs more processes, of both sides: rules compare cases of one run."""
    ours, theirs = to(workload="train", gc="on"), to(workload="others", gc="off")
    rule = Rule(name="pair", metric="step_s", go=go, match=ours, against=theirs)
    slow = planted.limited(0x4, 0.7)
    made = planted.planted(
        lambda c, m: slow(c, m) if c.axes["gc"] == "on" else m, planted.GC[:2], rules=(rule,)
    )
    peer, own = made.suite.cases
    peer = replace(peer, workload="others", settings=replace(peer.settings, processes=1))
    measured = [m for m in made.measurements if m.case_id == own.case_id or m.process < 1]
    suite = replace(made.suite, cases=(peer, own))
    of = Study(replace(made, suite=suite, measurements=tuple(measured)))

    assert bool(remedies.relevant(causes(of), of.verdict)) == named
    of_steps = [
        replace(r, stated=r.stated and replace(r.stated, metric="steps_taken"))
        for r in of.verdict.rules
    ]
    assert not remedies.relevant(causes(of), replace(of.verdict, rules=tuple(of_steps))), (
        "a slow step does not explain a missed loss"
    )
    first = next(remedies.next_steps(of.verdict, of))
    assert first.startswith("Measure in 3 processes per case: ")
    assert f"-f {own.case_id} -f {peer.case_id} " in first
