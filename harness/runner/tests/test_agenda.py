"""A run measures first what decides, and ends early where a rule or its budget says so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.records import Gap, Match, MeasureSettings, Outcome, Rule, Stop, Suspect, Suspects
from harness.runner.run import Agenda, Budget
from harness.tests import fake_runs

SLOW = (50.0, 50.1, 50.2)
"""tokens/s of three processes."""
FAST = Stop(rule="fast")


def floor(go: float, workload: str, name: str = "", **fields: Any) -> Rule:
    """A rung: this workload reaches so many tokens/s."""
    asked: dict[str, Any] = {"abort_early": True, "match": fake_runs.to(workload=workload)} | fields
    return Rule(name=name or "fast", metric="tokens_per_s", go=go, **asked)


class Machine:
    """Measures cases of one letter at once, a capital one by another provider: tokens/s by process,
    0 for a crash; its clock counts 10 s a process."""

    def __init__(
        self, names: str, *rules: Rule, processes: int = 3, most: int = 0, **speeds: Sequence[float]
    ):
        by, of = ("dense", "nsa"), MeasureSettings(processes=processes, most_processes=most)
        cases = [
            fake_runs.case({}, workload=n.lower(), provider=by[n.islower()], case_id=n, settings=of)
            for n in names
        ]
        self.run = fake_runs.run(cases, lambda _: [], rules=rules)
        self.speeds, self.now = speeds, 1000.0

    def agenda(self, *, abort: bool = True, budget: Budget | None = None) -> Agenda:
        return Agenda(
            self.run.suite,
            recorded=self.run.measurements,
            device="NVIDIA H200",
            read=lambda: self.run,
            abort=abort,
            budget=budget,
        )

    def budget(self, total_s: float) -> Budget:
        return Budget(total_s=total_s, ends_at=self.now + total_s, clock=lambda: self.now)

    def steps(self, agenda: Agenda) -> Iterator[str]:
        while step := agenda.next():
            case, process = step
            name = case.case_id
            tokens_per_s = self.speeds.get(name, (1e3,) * 9)[process]
            made = fake_runs.ended(case, Outcome.CRASH)
            if tokens_per_s:
                made = fake_runs.timed(case, 512 / tokens_per_s, processes=1)
            found = replace(made[0], process=process, asked_by=agenda.why(case, process))
            self.now += 10.0
            self.run = replace(self.run, measurements=(*self.run.measurements, found))
            agenda.ended(found)
            yield f"{name}{process}"

    def ran(self, agenda: Agenda | None = None) -> tuple[str, Stop | None]:
        """The processes in their order, and why others are left."""
        agenda = agenda or self.agenda()
        return " ".join(self.steps(agenda)), agenda.stop


# --- rules that end a run ----------------------------------------------------------------


def test_a_ladder_is_judged_rung_by_rung_and_the_first_no_go_ends_the_run() -> None:
    rules = [floor(go, name, f"{go}") for go, name in ((10, "b"), (100, "a"), (500, "c"))]

    met = Machine("dcba", *rules).ran()
    broken = Machine("dcba", *rules, b=SLOW, a=SLOW).ran()
    failed = Machine("dcba", *rules, b=(0,)).ran()

    assert met == ("b0 b1 b2 a0 a1 a2 c0 c1 c2 d0 d1 d2", None)
    assert broken == ("b0 b1 b2 a0 a1 a2", Stop(rule="100"))
    assert failed == ("b0", Stop(rule="10"))


@pytest.mark.parametrize(
    ("speeds", "why"),
    [
        ((50.0, 50.1, 5000.0), "a later process overturns what two would decide"),
        ((95.0, 100.0, 105.0), "across the limit"),
        ((200.0, 200.0, 200.0), "met"),
    ],
)
def test_only_a_no_go_of_all_processes_ends_a_run(speeds: Sequence[float], why: str) -> None:
    ran = Machine("ba", floor(100, "a"), a=speeds).ran()

    assert ran == ("a0 a1 a2 b0 b1 b2", None), why


@pytest.mark.parametrize(
    ("fields", "abort", "ran"),
    [
        ({"gpu": "A100"}, True, "a0 b0 b1 a1 a2 b2"),
        ({"gpu": "!H200"}, True, "a0 b0 b1 a1 a2 b2"),
        ({"abort_early": False}, True, "b0 a0 a1 b1 b2 a2"),
        ({}, False, "b0 a0 a1 b1 b2 a2"),
    ],
)
def test_other_rules_end_no_run_and_give_each_case_one_process_first(
    fields: dict[str, Any], abort: bool, ran: str
) -> None:
    machine = Machine("ab", floor(100, "b", **fields), b=SLOW)

    assert machine.ran(machine.agenda(abort=abort)) == (ran, None)


@pytest.mark.parametrize("killed_after", range(4))
def test_a_killed_run_ends_where_it_would_have_ended(killed_after: int) -> None:
    """Also if it is killed between the last process of the rule and the end of the record."""
    machine = Machine("ba", floor(100, "a"), a=SLOW)
    before = machine.steps(machine.agenda())
    done = [next(before) for _ in range(killed_after)]

    steps, stop = machine.ran()

    assert (done + steps.split(), stop) == (["a0", "a1", "a2"], FAST)


def test_both_sides_of_a_ratio_are_measured_together_and_before_it_is_judged() -> None:
    rule = floor(1.0, "b", against=fake_runs.to(workload="c"))

    assert Machine("abc", rule, b=SLOW).ran() == ("b0 c0 c1 b1 b2 c2", FAST)
    for rules in [], [floor(1, "", abort_early=False, match=Match())]:
        assert Machine("abAB", *rules, processes=1).ran() == ("a0 A0 b0 B0", None)


# --- a budget ----------------------------------------------------------------------------


def test_a_budget_measures_each_case_that_decides_once_before_any_twice() -> None:
    """A control after a main rule over other cases; `d` decides nothing."""
    machine = Machine("dabc", floor(1, "c", "3"), floor(1, "b", "2", abort_early=False))
    gap = Gap(metric="tokens_per_s", expected=500, seen=11, source="an old report")
    control = Suspect(name="the model without it", control=fake_runs.to(workload="a"))
    suspects = Suspects(gap=gap, tested=(control,))
    machine.run = replace(machine.run, suite=replace(machine.run.suite, suspects=suspects))

    steps, stop = machine.ran(machine.agenda(budget=machine.budget(60)))
    rest, whole = machine.ran()

    assert (steps, stop) == ("c0 b0 a0 c1 b1 a1", Stop(budget_s=60))
    assert (len(rest.split()), whole) == (6, None)


def test_a_rule_may_end_a_run_with_a_budget() -> None:
    machine = Machine("ba", floor(100, "a"), a=SLOW)

    assert machine.ran(machine.agenda(budget=machine.budget(600))) == ("a0 a1 a2", FAST)


# --- more processes where it decides -----------------------------------------------------

OPEN = (115.0, 125.0, 122.0, 121.0, 123.0)
"""Two processes do not show that they are above 100; three do."""
SCATTERED = (60.0, 150.0, 70.0, 140.0, 65.0)


def adaptive(**speeds: Sequence[float]) -> Machine:
    rules = [floor(100, name, name, abort_early=False) for name in "ab"]
    return Machine("abc", *rules, processes=2, most=5, **speeds)


def test_an_open_rule_gets_more_processes_until_it_is_decided_and_a_decided_one_none() -> None:
    machine = adaptive(b=OPEN, c=SCATTERED)

    assert machine.ran() == ("a0 b0 c0 c1 b1 a1 b2", None)
    assert {(m.case_id, m.process): m.asked_by for m in machine.run.measurements if m.asked_by} == {
        ("b", 2): "b"
    }


@pytest.mark.parametrize(
    ("speeds", "ran"), [(SCATTERED, " a2 a3 a4"), ((60.0, 150.0, 0.0), " a2"), ((60.0, 0.0), "")]
)
def test_a_rule_that_stays_open_ends_with_the_last_process_or_a_failure(
    speeds: Sequence[float], ran: str
) -> None:
    assert adaptive(a=speeds).ran() == (f"a0 b0 c0 c1 b1 a1{ran}", None)


def test_of_several_open_cases_the_main_rule_and_the_most_scattered_come_first() -> None:
    both = Match(criteria={"workload": ("a", "b")})
    other = floor(100, "c", "other", abort_early=False)
    rule = floor(100, "a", asks="main", abort_early=False, match=both)
    machine = Machine("abc", other, rule, processes=2, most=3, a=OPEN, b=SCATTERED, c=SCATTERED)
    suite = replace(machine.run.suite, parts={"main": "Fast enough?"})
    machine.run = replace(machine.run, suite=suite)

    assert machine.ran()[0].split()[6:] == ["b2", "a2", "c2"]


@pytest.mark.parametrize("budget_s", [0, 600])
@pytest.mark.parametrize("killed_after", range(13))
def test_a_resumed_run_goes_on_with_its_rounds(killed_after: int, budget_s: float) -> None:
    machine, whole = (adaptive(a=SCATTERED, b=SCATTERED) for _ in range(2))
    budget = machine.budget(budget_s) if budget_s else None
    before = machine.steps(machine.agenda(budget=budget))
    done = [next(before) for _ in range(killed_after)]

    steps, stop = machine.ran(machine.agenda(budget=budget))

    assert (sorted(done + steps.split()), stop) == (sorted(whole.ran()[0].split()), None)


def test_a_round_is_finished_although_its_first_process_decides() -> None:
    rule = floor(1.0, "a", abort_early=False, against=fake_runs.to(workload="b"))
    machine = Machine("abc", rule, processes=2, most=3, a=OPEN, b=(100.0, 100.1, 100.0))
    before = machine.steps(machine.agenda())
    done = [next(before) for _ in range(7)]

    assert (done[6:], machine.ran()) == (["a2"], ("b2", None))


def test_a_budget_may_end_between_rounds_and_another_goes_on() -> None:
    machine = adaptive(a=SCATTERED)

    first = machine.ran(machine.agenda(budget=machine.budget(75)))

    assert first == ("a0 b0 a1 b1 c0 c1 a2 a3", Stop(budget_s=75))
    assert machine.ran() == ("a4", None)
