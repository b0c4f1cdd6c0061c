"""The first screen: it answers each part of the question, says what to do, and what to doubt."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.effects import versus
from harness.analysis.study import Study, case_names
from harness.analysis.summary import summarise
from harness.analysis.suspects import Conclusion, Diagnosis, Reproduction
from harness.records import (
    Accuracy,
    Case,
    CostPlan,
    Gap,
    Measurement,
    Outcome,
    Ratio,
    Rule,
    Run,
    Stop,
    Suspects,
    TensorError,
    Weight,
)
from harness.report import explained
from harness.report.tests.test_report import values
from harness.tests.fake_runs import run, sweep, timed, to, variables

CASES = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512, 2048])]

FLOOR = Rule(name="floor", metric="tokens_per_s", go=500, asks="fast", match=to(provider="nsa"))
RATIO = Rule(
    name="ratio",
    metric="step_s",
    go=2.0,
    abort=1.0,
    asks="faster",
    match=to(provider="nsa"),
    against=to(provider="dense"),
)
PARTS = {"fast": "Is it fast enough?", "faster": "Is it twice as fast as dense?"}


def measured(
    dense_s: float = 2.5,
    processes: int = 3,
    rules: tuple[Rule, ...] = (FLOOR, RATIO),
    long_dense_s: float | None = None,
    failed: Outcome | None = None,
    **suite: Any,
) -> Run:
    def measure(c: Case) -> list[Measurement]:
        dense = c.provider == "dense"
        theirs_s = long_dense_s if long_dense_s and c.axes["seq_len"] == 2048 else dense_s
        made = timed(c, theirs_s if dense else 1.0, processes=processes if dense else 3)
        broken = failed if dense else None
        return [replace(m, outcome=broken, samples_s=()) for m in made] if broken else made

    of = replace(CASES[0].settings, processes=processes)
    cases = [replace(c, settings=of) if c.provider == "dense" else c for c in CASES]
    return run(cases, measure, rules=rules, **{"parts": PARTS, **suite})


def row(recorded: Run, part: str) -> tuple[str, str]:
    """The answer to one part: yes or no, and because."""
    rows = values(recorded)["parts"].rows
    return next((word, why) for question, word, why, _ in rows if question == PARTS[part])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "yes"),
        ({"dense_s": 1.5}, "no"),
        ({"dense_s": 0.5}, "no"),
        ({"dense_s": 2.0}, "open"),
        ({"processes": 1}, "likely"),
        ({"processes": 1, "dense_s": 1.5}, "likely not"),
        ({"failed": Outcome.HANG, "peers": ("dense",)}, "not measured"),
        ({"rules": (FLOOR, replace(RATIO, gpu="A100"))}, "not measured"),
        ({"dense_s": 0.5, "rules": (FLOOR, replace(RATIO, counts=Weight.CONDITION))}, "no"),
    ],
)
def test_each_part_of_the_question_has_its_answer(changes: dict[str, Any], said: str) -> None:
    recorded = measured(**changes)

    assert (row(recorded, "fast")[0], row(recorded, "faster")[0]) == ("yes", said)


YES = "**Yes** (Is it fast enough?): worst of 2 cases (nsa, seq_len=512): "
NO = "**No** (Is it twice as fast as dense?): "


@pytest.mark.parametrize(
    ("changes", "said", "step"),
    [
        ({}, YES, "Nothing: every limit that decides is met."),
        ({"left_out": 4}, YES, "Run all 8 cases: `harness run"),
        ({"dense_s": 1.5}, NO, "Speed up nsa, seq_len=2048 by "),
        ({"dense_s": 1.5, "deciding": ("fast",)}, "**No, for information** (Is it", "Nothing"),
        ({"dense_s": 2.0, "deciding": ("fast",)}, "**Open, for information** (Is it", ""),
        ({"processes": 1}, "**Likely** (Is it twice as fast as dense?)", "Measure in 3 processes"),
        ({"rules": (), "parts": {}}, "measured: no rule decides; all 4 cases ran.", "Nothing"),
    ],
)
def test_the_first_lines_have_the_answer_and_the_next_step(
    changes: dict[str, Any], said: str, step: str
) -> None:
    built = values(measured(**changes))

    assert said in built["answer"]
    assert built["next"].startswith(step)


def test_a_large_effect_that_leaves_enough_speed_says_so_beside_the_earlier_one() -> None:
    gap = Gap(metric="tokens_per_s", expected=100, seen=33, source="s")
    suite = replace(measured().suite, suspects=Suspects(gap=gap, tested=()))
    effect = Ratio(value=18.6, low=17.4, high=19.9, n=3)
    undecided = Conclusion.UNDECIDED
    kernels = Diagnosis(name="kernels", conclusion=undecided, effect=effect, reached=4200.0)
    loose = replace(kernels, name="loose", reached=50.0)

    table = explained.suspects_table([kernels, loose], suite, [kernels], "2026-11-21")

    assert table
    assert table.columns[3] == ">on 2026-11-21"
    rows = [
        ("18.6x [17.4 … 19.9] slower", "undecided: still 4,200 tokens/s here"),
        ("–", "undecided"),
    ]
    assert [row[-2:] for row in table.rows] == rows


@pytest.mark.parametrize(
    ("times", "then", "said"),
    [
        (149.0, "on", "not known: that day's settings give 4,920 tokens/s here, 150x as much"),
        (1.2, "on", "loop, which was on, is enough by itself: 40 tokens/s here"),
        (1.2, "off", "not explained: nothing that was tested was on in the run that made 33"),
    ],
)
def test_what_was_off_or_is_not_reproduced_explains_nothing(
    times: float, then: str, said: str
) -> None:
    gap = Gap(metric="tokens_per_s", expected=100, seen=33, gpu="A100", source="s")
    suite = replace(measured().suite, suspects=Suspects(gap=gap, tested=()))
    again = Reproduction(case_id=suite.cases[0].case_id, here=33 * times, times=times)
    reproduced = explained.reproduced_sentence(again, Study(replace(measured(), suite=suite)))
    loop = Diagnosis(name="loop", conclusion=Conclusion.ENOUGH, reached=40.0, then=then)

    assert explained.line([loop], suite, "NVIDIA H200", again).startswith(said)
    assert ("does not reproduce" in reproduced) is (times > 4)


def test_a_reason_is_given_once_among_the_cases_that_did_not_run() -> None:
    recorded = measured(failed=Outcome.UNSUPPORTED, peers=("dense",))
    lacking = [
        replace(m, detail="flash-linear-attention is not installed") if m.detail == "" else m
        for m in recorded.measurements
    ]
    built = values(replace(recorded, measurements=tuple(lacking)))

    assert "no time of dense (unsupported)" in str(built["parts"])
    assert "not installed" not in f"{built['lines']}{built['parts']}{built['rules']}"
    assert str(built["not_run"]).count("not installed") == 1


def steps(recorded: Run) -> str:
    return "\n".join(values(recorded)["next_steps"])


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"processes": 1}, "-s measure.processes=3`"),
        ({"dense_s": 2.0}, "-s measure.processes=6`"),
        ({"decides_for": "A100"}, "Run the suite on an A100"),
        ({"failed": Outcome.CRASH}, "Reproduce dense, seq_len=512 (crash): `harness run"),
    ],
)
def test_what_would_make_it_a_go_is_a_command(changes: dict[str, Any], command: str) -> None:
    assert command in steps(measured(**changes))


@pytest.mark.parametrize(
    ("stop", "option"), [(Stop(rule="fast"), " --no-abort"), (Stop(budget_s=60.0), "")]
)
def test_a_stopped_run_says_how_to_measure_the_rest(stop: Stop, option: str) -> None:
    recorded = replace(measured(), stopped=stop)
    recorded = replace(recorded, measurements=recorded.measurements[:-3])

    assert f"rest of the suite: `harness run --resume {recorded.folder}{option}`" in steps(recorded)


def test_correct_cases_elsewhere_do_not_vouch_for_the_answer() -> None:
    error = Accuracy(tensors=(TensorError(name="", error=0.2, bound=0.5),))

    def measure(c: Case) -> list[Measurement]:
        vouched = c.provider == compared
        return [replace(m, accuracy=error if vouched else None) for m in timed(c, 1.0)]

    for compared, which in (("nsa", "."), ("dense", "; of 2 cases behind the answers: 2 without")):
        said = values(run(CASES, measure, rules=[replace(FLOOR, asks="")]))["trust"]
        assert f"6 of 12 outputs checked, all correct{which}" in said, compared


def test_a_run_whose_slow_cases_timed_out_says_what_is_fast_first() -> None:
    shown = values(variables())

    fast = "the fastest is nsa, A=1, B=1 with 539 [537 … 541] tokens/s (2 cases alike)"
    slow = "6 cases take over 45 s a step"
    assert shown["answer"] == f"measured: 2 of 8 cases end in time: {fast}; {slow}."
    assert shown["next_steps"] == ()
    (section,) = shown["asked"]
    assert section["effects"][:2] == [
        "A=1 with B=1 is at least 47x faster; neither alone is shown to be.",
        "`A`, 1 against 0: at least 47x faster (2 pairs, B=1).",
    ]
    assert section["table"].rows[0][1:3] == ("under 11.4 (timeout)", "over 45 s (timeout)")


def test_a_label_that_fits_two_cases_alike_is_not_used() -> None:
    recorded = measured(labels=(("all", to(seq_len=512)), ("all", to(seq_len=2048))))

    assert set(case_names(recorded.suite).values()) == {c.case_id for c in CASES}


# --- the first provider against the others -----------------------------------------------

AHEAD = {512: 0.5, 1024: 0.8, 2048: 1.6, 4096: 3.0}
"""Length -> how many times as fast nsa is."""


def crossing(ratios: dict[int, float], processes: int = 3) -> Run:
    cases = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[*ratios])]

    def measure(c: Case) -> list[Measurement]:
        length = int(c.axes["seq_len"])
        step = 0.001 * length / (ratios[length] if c.provider == "nsa" else 1)
        return timed(c, step, cv=0.002, processes=processes)

    return run(cases, measure)


@pytest.mark.parametrize(
    ("ratios", "processes", "between"),
    [
        (AHEAD, 3, (1024, 2048)),
        (AHEAD, 1, None),
        ({512: 0.5, 1024: 2.0, 2048: 0.5, 4096: 3.0}, 3, (2048, 4096)),
    ],
)
def test_a_crossover_lies_between_measured_lengths(
    ratios: dict[int, float], processes: int, between: tuple[int, int] | None
) -> None:
    (found,) = versus(summarise(crossing(ratios, processes)))

    assert found.crossover == between


@pytest.mark.parametrize("judged", [False, True])
def test_a_crossover_that_no_rule_asks_for_is_not_in_the_answer(judged: bool) -> None:
    recorded = crossing(AHEAD)
    rules = (replace(RATIO, asks="", go=0.1, abort=None),) if judged else ()
    built = values(replace(recorded, suite=replace(recorded.suite, rules=rules)))

    said = [sentence for sentence in built["answers"] if "overtakes" in sentence]
    where = "between seq_len 1024 and 2048 (1 of 1 configuration)."
    assert said == [f"nsa overtakes dense {where}"][: int(judged)]


def test_a_long_table_has_its_far_end_on_the_page_and_all_of_it_in_the_appendix() -> None:
    (section,) = values(crossing({2**n: 2.0 for n in range(8, 22)}))["sections"]

    (row,) = section["table"].rows
    assert section["table"].columns == (">nsa", ">dense", ">nsa against dense")
    assert row[2].endswith("faster")
    assert len(section["full"].rows) == 14


def test_a_table_has_a_column_a_provider_and_how_they_compare() -> None:
    (section,) = values(crossing({**AHEAD, 1024: 1.0}))["sections"]
    table = section["table"]

    assert table.columns == ("seq_len", ">nsa", ">dense", ">nsa against dense")
    ends = [row[-1].rpartition("] ")[2] for row in table.rows]
    assert ends == ["slower", "as fast", "faster", "faster"]
    assert [row[-1].startswith("~") for row in table.rows] == [False, True, False, False]


def test_a_suite_with_a_cost_says_what_is_ready() -> None:
    fast, faster = PARTS.values()
    missed = measured(dense_s=1.5, cost=CostPlan(steps=10, match=FLOOR.match))

    ready = [f"**Ready**: {fast}", f"**Not ready**: {faster}"]
    assert values(missed)["readiness"] == [*ready, "**Phases that ran**: train"]
    assert values(measured())["readiness"] == []
    for end, state in (Outcome.CRASH, "failed"), (Outcome.TIMEOUT, "are open"):
        left = measured(failed=end, cost=CostPlan(steps=10, match=FLOOR.match))
        assert f"**Phases that {state}**: train" in values(left)["readiness"]


def test_what_the_steps_of_a_plan_take_has_intervals_from_three_processes_on() -> None:
    for processes, sure in (3, " [95 %]"), (2, ""):
        plan = CostPlan(steps=10, match=to(provider="dense"))
        cost = values(measured(processes=processes, cost=plan))["cost"]
        assert cost.columns == ("case", f">10 steps take{sure}")
