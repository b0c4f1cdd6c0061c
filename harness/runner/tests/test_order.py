"""A run measures first what decides, and ends early where a rule or its budget says so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis import summary, verdict
from harness.analysis.scaling import fit
from harness.records import Case, Match, Measurement, Outcome, Rule, Stop, Suite, Verdict
from harness.runner.order import Agenda, Budget
from harness.tests import fake_runs

H200 = "NVIDIA H200"
Plan = list[tuple[str, int]]


def case(name: str, *, processes: int = 3, timeout_s: float = 300.0) -> Case:
    made = fake_runs.case({"seq_len": 512}, workload=name)
    settings = replace(made.settings, processes=processes, timeout_s=timeout_s)
    return replace(made, case_id=name, settings=settings)


def floor(name: str, go: float, *workloads: str, **fields: Any) -> Rule:
    """A rung: these workloads reach so many tokens/s."""
    match = Match(criteria={"workload": workloads})
    asked = {"abort_early": True} | fields
    return Rule(name=name, metric="tokens_per_s", go=go, match=match, **asked)


class Machine:
    """Measures at once: each workload at its tokens/s by process, on a clock of its own."""

    def __init__(
        self,
        cases: Sequence[Case],
        rules: Sequence[Rule] = (),
        speeds: dict[str, Sequence[float]] | None = None,
        life_s: dict[str, float] | None = None,
    ) -> None:
        self.run = fake_runs.run(cases, lambda _: [], rules=rules)
        self.speeds, self.life_s = speeds or {}, life_s or {}
        self.now = 1000.0

    @property
    def suite(self) -> Suite:
        return self.run.suite

    def decide(self) -> Verdict:
        cases = summary.summarise(self.run)
        return verdict.judge(self.suite, self.run.environment, cases, fit(cases))

    def measure(self, asked: Case, process: int) -> Measurement:
        speeds = self.speeds.get(asked.case_id, (1000.0,) * 3)
        life_s = self.life_s.get(asked.case_id, 10.0)
        self.now += life_s
        if not speeds[process]:
            (found,) = fake_runs.ended(asked, Outcome.CRASH, wall_s=life_s)
        else:
            (found,) = fake_runs.timed(asked, 512 / speeds[process], processes=1, wall_s=life_s)
        return replace(found, process=process)

    def steps(self, agenda: Agenda) -> Iterator[tuple[str, int]]:
        """What the agenda asks for until it ends; each step is recorded before the next."""
        while step := agenda.next():
            found = self.measure(*step)
            self.run = replace(self.run, measurements=(*self.run.measurements, found))
            agenda.ended(found)
            yield step[0].case_id, step[1]

    def agenda(self, *, abort: bool = True, **options: Any) -> Agenda:
        return Agenda(
            self.suite,
            recorded=self.run.measurements,
            device=H200,
            decide=self.decide if abort else None,
            **options,
        )

    def budget(self, minutes: float, **expected_s: float) -> Budget:
        total_s = 60 * minutes
        ends_at = self.now + total_s
        return Budget(
            total_s=total_s, ends_at=ends_at, expected_s=expected_s, clock=lambda: self.now
        )


def stopped_at(machine: Machine, agenda: Agenda) -> tuple[Plan, Stop | None]:
    return list(machine.steps(agenda)), agenda.stop


# --- rules that end a run ----------------------------------------------------------------


def test_the_cases_of_a_rule_that_may_end_the_run_come_first() -> None:
    machine = Machine([case("a"), case("b"), case("c")], [floor("fast", 100, "b", "c")])

    steps, stop = stopped_at(machine, machine.agenda())

    assert steps[:6] == [("b", 0), ("c", 0), ("c", 1), ("b", 1), ("b", 2), ("c", 2)]
    assert (steps[6:], stop) == ([("a", 0), ("a", 1), ("a", 2)], None)


def test_a_ladder_is_judged_rung_by_rung_and_the_first_no_go_ends_the_run() -> None:
    rules = [floor(f"{go} tokens/s", go, name) for go, name in ((10, "a"), (100, "b"), (500, "c"))]
    machine = Machine([case(n) for n in "dcba"], rules, {"a": (50,) * 3, "b": (50,) * 3})

    steps, stop = stopped_at(machine, machine.agenda())

    assert steps == [(name, process) for name in "ab" for process in range(3)]
    assert stop == Stop(rule="100 tokens/s")


def test_rungs_over_the_same_cases_are_all_judged_at_once() -> None:
    rules = [floor(f"{go} tokens/s", go, "a") for go in (10, 100, 500)]
    machine = Machine([case("a"), case("b")], rules, {"a": (50,) * 3})

    steps, stop = stopped_at(machine, machine.agenda())

    assert (len(steps), stop) == (3, Stop(rule="100 tokens/s"))


@pytest.mark.parametrize(
    ("speeds", "why"),
    [
        ((50, 50.1, 5000), "a later process overturns what two would decide"),
        ((95, 100, 105), "across the limit"),
        ((200, 200, 200), "met"),
    ],
)
def test_only_a_no_go_of_all_processes_ends_a_run(speeds: Sequence[float], why: str) -> None:
    machine = Machine([case("a"), case("b")], [floor("fast", 100, "a")], {"a": speeds})
    agenda = machine.agenda()

    assert len(list(machine.steps(agenda))) == 6, why
    assert agenda.stop is None


def test_a_failed_case_needs_no_further_processes_to_decide() -> None:
    machine = Machine([case("a"), case("b")], [floor("fast", 100, "a")], {"a": (0,)})

    assert stopped_at(machine, machine.agenda()) == ([("a", 0)], Stop(rule="fast"))


@pytest.mark.parametrize("fields", [{"gpu": "A100"}, {"abort_early": False}, {"gpu": "!H200"}])
def test_other_rules_do_not_end_a_run(fields: dict[str, Any]) -> None:
    rule = floor("fast", 100, "b", **fields)
    machine = Machine([case("a"), case("b")], [rule], {"b": (50,) * 3})

    steps, stop = stopped_at(machine, machine.agenda())

    assert (steps[0], len(steps), stop) == (("a", 0), 6, None)


def test_a_run_that_is_complete_was_not_stopped() -> None:
    machine = Machine([case("a")], [floor("fast", 100, "a")], {"a": (50,) * 3})

    assert stopped_at(machine, machine.agenda())[1] is None


def test_no_abort_measures_every_case() -> None:
    machine = Machine([case("a"), case("b")], [floor("fast", 100, "a")], {"a": (50,) * 3})

    steps, stop = stopped_at(machine, machine.agenda(abort=False))

    assert (len(steps), stop) == (6, None)


@pytest.mark.parametrize("killed_after", range(4))
def test_a_killed_run_ends_where_it_would_have_ended(killed_after: int) -> None:
    """Also if it is killed between the last process of the rule and the end of the record."""
    machine = Machine([case("b"), case("a")], [floor("fast", 100, "a")], {"a": (50,) * 3})
    before = machine.steps(machine.agenda())
    done = [next(before) for _ in range(killed_after)]

    steps, stop = stopped_at(machine, machine.agenda())

    assert done + steps == [("a", 0), ("a", 1), ("a", 2)]
    assert stop == Stop(rule="fast")


def test_both_sides_of_a_ratio_are_measured_before_it_is_judged() -> None:
    rule = floor("faster", 1.0, "a", against=Match(criteria={"workload": ("b",)}))
    speeds = {"a": (50, 50.1, 50.2), "b": (500, 500.1, 500.2)}
    machine = Machine([case("c"), case("a"), case("b")], [rule], speeds)

    steps, stop = stopped_at(machine, machine.agenda())

    assert {name for name, _ in steps} == {"a", "b"}
    assert (len(steps), stop) == (6, Stop(rule="faster"))


# --- a budget ----------------------------------------------------------------------------


def test_a_budget_measures_first_what_decides() -> None:
    rules = [
        floor("noted", 1, "a", abort_early=False),
        floor("asked", 1, "b", abort_early=False, asks="part"),
        floor("rung", 1, "c"),
    ]
    machine = Machine([case(n, processes=1) for n in "dabc"], rules)

    steps, stop = stopped_at(machine, machine.agenda(budget=machine.budget(60)))

    assert (steps, stop) == ([("c", 0), ("b", 0), ("a", 0), ("d", 0)], None)


def test_a_budget_takes_as_many_cases_as_fit_with_all_their_processes() -> None:
    """Two cases take turns in the 65 s that are left for them; a third would not fit."""
    machine = Machine([case(n) for n in "abc"])
    expected = dict.fromkeys("abc", 10.0)
    budget = machine.budget(65 / 60, **expected)

    steps, stop = stopped_at(machine, machine.agenda(budget=budget))

    assert steps == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert stop == Stop(budget_s=budget.total_s)
    assert machine.now < budget.ends_at


def test_a_slower_machine_than_expected_drops_the_least_deciding_case() -> None:
    machine = Machine([case("a"), case("b")], life_s={"a": 10, "b": 30})
    budget = machine.budget(1, a=10.0, b=10.0)

    steps, stop = stopped_at(machine, machine.agenda(budget=budget))

    assert steps == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert (stop, machine.now) == (Stop(budget_s=60), budget.ends_at)


def test_without_an_earlier_run_the_first_process_shows_how_long_the_others_take() -> None:
    """The limit of each process alone would let one case run."""
    cases = [replace(case(n, timeout_s=100.0), workload="same") for n in "abcd"]
    machine = Machine(cases, life_s=dict.fromkeys("abcd", 4.0))
    budget = machine.budget(2)

    steps, stop = stopped_at(machine, machine.agenda(budget=budget))

    assert (len(steps), stop) == (12, None)


def test_a_process_whose_limit_exceeds_the_budget_is_not_started() -> None:
    machine = Machine([case("a", timeout_s=100.0)])

    steps, stop = stopped_at(machine, machine.agenda(budget=machine.budget(1)))

    assert (steps, stop) == ([], Stop(budget_s=60))


def test_a_budget_keeps_both_sides_of_a_pair_together() -> None:
    rule = floor(
        "faster", 1.0, "a", abort_early=False, against=Match(criteria={"workload": ("z",)})
    )
    machine = Machine([case(n, processes=1) for n in "abz"], [rule])
    budget = machine.budget(25 / 60, **dict.fromkeys("abz", 10.0))

    steps, _ = stopped_at(machine, machine.agenda(budget=budget))

    assert steps == [("a", 0), ("z", 0)]


@pytest.mark.parametrize("killed_after", range(5))
def test_a_resumed_run_goes_on_with_a_budget_of_its_own(killed_after: int) -> None:
    machine = Machine([case("a"), case("b")])
    before = machine.steps(machine.agenda(budget=machine.budget(1, a=10.0, b=10.0)))
    done = [next(before) for _ in range(killed_after)]

    steps, stop = stopped_at(machine, machine.agenda(budget=machine.budget(1, a=10.0, b=10.0)))

    assert stop is None
    assert sorted(done + steps) == [(name, process) for name in "ab" for process in range(3)]


def test_a_rule_may_end_a_run_with_a_budget() -> None:
    machine = Machine([case("b"), case("a")], [floor("fast", 100, "a")], {"a": (50,) * 3})

    steps, stop = stopped_at(machine, machine.agenda(budget=machine.budget(60)))

    assert (len(steps), stop) == (3, Stop(rule="fast"))
