"""A run measures first what decides, and ends early where a rule or its budget says so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis import summary, verdict
from harness.analysis.scaling import fit
from harness.records import Match, Outcome, Rule, Stop, Verdict
from harness.runner.run import Agenda, Budget
from harness.tests import fake_runs

SLOW = (50.0, 50.1, 50.2)
"""tokens/s of three processes."""
FAST = Stop(rule="fast")


def floor(go: float, workload: str, name: str = "", **fields: Any) -> Rule:
    """A rung: this workload reaches so many tokens/s."""
    match = Match(criteria={"workload": (workload,)})
    asked = {"abort_early": True} | fields
    return Rule(name=name or "fast", metric="tokens_per_s", go=go, match=match, **asked)


class Machine:
    """Measures cases of one letter at once: tokens/s by process, 0 for a crash; its clock counts
    10 s a process."""

    def __init__(self, names: str, *rules: Rule, processes: int = 3, **speeds: Sequence[float]):
        settings = replace(fake_runs.case({}).settings, processes=processes)
        cases = [
            replace(fake_runs.case({"seq_len": 512}, workload=n), case_id=n, settings=settings)
            for n in names
        ]
        self.run = fake_runs.run(cases, lambda _: [], rules=rules)
        self.speeds, self.life_s, self.now = speeds, dict.fromkeys(names, 10.0), 1000.0

    def decide(self) -> Verdict:
        cases = summary.summarise(self.run)
        return verdict.judge(self.run.suite, self.run.environment, cases, fit(cases))

    def agenda(self, *, abort: bool = True, budget: Budget | None = None) -> Agenda:
        return Agenda(
            self.run.suite,
            recorded=self.run.measurements,
            device="NVIDIA H200",
            decide=self.decide if abort else None,
            budget=budget,
        )

    def budget(self, total_s: float, **expected_s: float) -> Budget:
        ends_at = self.now + total_s
        return Budget(
            total_s=total_s, ends_at=ends_at, expected_s=expected_s, clock=lambda: self.now
        )

    def steps(self, agenda: Agenda) -> Iterator[str]:
        while step := agenda.next():
            case, process = step
            name = case.case_id
            tokens_per_s = self.speeds.get(name, (1e3,) * 9)[process]
            made = (
                fake_runs.timed(case, 512 / tokens_per_s, processes=1)
                if tokens_per_s
                else fake_runs.ended(case, Outcome.CRASH)
            )
            found = replace(made[0], process=process, wall_s=self.life_s[name])
            self.now += found.wall_s
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

    assert met == ("b0 b1 b2 a0 a1 a2 c0 c1 c2 d0 d1 d2", None)
    assert broken == ("b0 b1 b2 a0 a1 a2", Stop(rule="100"))


def test_rungs_over_the_same_cases_are_judged_at_once_in_their_order() -> None:
    rules = [floor(go, "a", f"{go}") for go in (10, 100, 500)]

    assert Machine("ba", *rules, a=SLOW).ran() == ("a0 a1 a2", Stop(rule="100"))


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


def test_a_failed_case_needs_no_further_processes_to_decide() -> None:
    assert Machine("ba", floor(100, "a"), a=(0,)).ran() == ("a0", FAST)


@pytest.mark.parametrize(
    ("fields", "abort"),
    [
        ({"gpu": "A100"}, True),
        ({"gpu": "!H200"}, True),
        ({"abort_early": False}, True),
        ({}, False),
    ],
)
def test_other_rules_neither_come_first_nor_end_a_run(fields: dict[str, Any], abort: bool) -> None:
    machine = Machine("ab", floor(100, "b", **fields), b=SLOW)

    assert machine.ran(machine.agenda(abort=abort)) == ("a0 b0 b1 a1 a2 b2", None)


def test_a_complete_run_was_not_stopped() -> None:
    assert Machine("a", floor(100, "a"), a=SLOW).ran() == ("a0 a1 a2", None)


@pytest.mark.parametrize("killed_after", range(4))
def test_a_killed_run_ends_where_it_would_have_ended(killed_after: int) -> None:
    """Also if it is killed between the last process of the rule and the end of the record."""
    machine = Machine("ba", floor(100, "a"), a=SLOW)
    before = machine.steps(machine.agenda())
    done = [next(before) for _ in range(killed_after)]

    steps, stop = machine.ran()

    assert (done + steps.split(), stop) == (["a0", "a1", "a2"], FAST)


def test_both_sides_of_a_ratio_are_measured_before_it_is_judged() -> None:
    rule = floor(1.0, "b", against=Match(criteria={"workload": ("c",)}))

    assert Machine("abc", rule, b=SLOW).ran() == ("b0 c0 c1 b1 b2 c2", FAST)


# --- a budget ----------------------------------------------------------------------------


def test_a_budget_measures_first_what_decides() -> None:
    noted, asked = floor(1, "a", "1", abort_early=False), floor(1, "b", "2", abort_early=False)
    rules = noted, replace(asked, asks="part"), floor(1, "c", "3")
    machine = Machine("dabc", *rules, processes=1)

    assert machine.ran(machine.agenda(budget=machine.budget(600))) == ("c0 b0 a0 d0", None)


def test_a_budget_takes_as_many_cases_as_fit_with_all_their_processes() -> None:
    """Two cases take turns in 65 s; a third would not fit."""
    machine = Machine("abc")
    budget = machine.budget(65, a=10.0, b=10.0, c=10.0)

    assert machine.ran(machine.agenda(budget=budget)) == ("a0 b0 b1 a1 a2 b2", Stop(budget_s=65))


def test_a_slower_machine_than_expected_drops_the_least_deciding_case() -> None:
    machine = Machine("ab")
    machine.life_s["b"] = 30.0
    budget = machine.budget(60, a=10.0, b=10.0)

    assert machine.ran(machine.agenda(budget=budget)) == ("a0 b0 a1 a2", Stop(budget_s=60))
    assert machine.now == budget.ends_at


def test_the_slowest_of_the_run_stands_for_a_workload_that_was_not_seen() -> None:
    """Not its limit of 300 s: a run of several workloads would end after the first one."""
    machine = Machine("ab")

    assert machine.ran(machine.agenda(budget=machine.budget(310))) == ("a0 b0 b1 a1 a2 b2", None)


@pytest.mark.parametrize(
    ("total_s", "ran"),
    [(299, ("", Stop(budget_s=299))), (350, ("a0 b0 c0 c1 b1 a1 a2 b2 c2", None))],
)
def test_without_an_earlier_run_a_workload_shows_how_long_it_takes(
    total_s: float, ran: tuple[str, Stop | None]
) -> None:
    """Its first process may take its limit, 300 s."""
    machine = Machine("abc")
    cases = tuple(replace(c, workload="same") for c in machine.run.suite.cases)
    machine.run = replace(machine.run, suite=replace(machine.run.suite, cases=cases))

    assert machine.ran(machine.agenda(budget=machine.budget(total_s))) == ran


@pytest.mark.parametrize("killed_after", range(5))
def test_a_resumed_run_goes_on_with_a_budget_of_its_own(killed_after: int) -> None:
    machine = Machine("ab")
    before = machine.steps(machine.agenda(budget=machine.budget(60, a=10.0, b=10.0)))
    done = [next(before) for _ in range(killed_after)]

    steps, stop = machine.ran(machine.agenda(budget=machine.budget(60, a=10.0, b=10.0)))

    assert (sorted(done + steps.split()), stop) == (["a0", "a1", "a2", "b0", "b1", "b2"], None)


def test_a_rule_may_end_a_run_with_a_budget() -> None:
    machine = Machine("ba", floor(100, "a"), a=SLOW)

    assert machine.ran(machine.agenda(budget=machine.budget(600))) == ("a0 a1 a2", FAST)
