"""A run of several GPUs: what is not compared, and what its record says."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.analysis.effects import effects
from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.gate import compare
from harness.records import Case, Decision, Measurement, Rule, Run, joined
from harness.report.text import finding_sentence, note_text
from harness.tests.fake_runs import H200, environment, run, sweep, timed, to

HERE = [environment(gpu=replace(H200, uuid=f"GPU-{n}")) for n in range(6)]


def on(*uuids: str, rules: Sequence[Rule] = ()) -> Run:
    """Two cases, gc off and on, on these GPUs."""
    cases = sweep(gc=["off", "on"])
    card = {c.case_id: uuid for c, uuid in zip(cases, uuids, strict=True)}

    def measure(c: Case) -> list[Measurement]:
        return [replace(m, card=card[c.case_id]) for m in timed(c, 0.1, cv=0.001)]

    return run(cases, measure, env=joined(HERE[:2]), run_id="-".join(uuids), rules=rules)


def test_what_is_compared_is_of_one_gpu() -> None:
    rule = Rule(name="r", metric="step_s", go=0.5, match=to(gc="off"), against=to(gc="on"))
    one, two = on("GPU-0", "GPU-0", rules=[rule]), on("GPU-0", "GPU-1", rules=[rule])
    assert [len(effects(summarise(made))) for made in (one, two)] == [1, 0]
    moved = [replace(m, card=f"GPU-{m.process % 2}") for m in one.measurements]
    first, _ = summarise(replace(one, measurements=(*moved,)))
    assert "its processes ran on 2 GPUs" in map(note_text, first.notes)
    found = [next(r for r in Study(made).verdict.rules if r.stated) for made in (one, two)]
    assert [r.decision for r in found] == [Decision.GO, Decision.INCONCLUSIVE]
    said = finding_sentence(found[1].findings[0])
    assert said == "step time not available: train/nsa/gc=on was measured on another GPU"


def test_a_case_that_two_runs_have_on_other_gpus_is_compared_as_such() -> None:
    def card(a: Run, b: Run) -> list[float | None]:
        found = (case.comparison for case in compare.runs(a, Study(b)).cases)
        return [c.facts.get("card") for c in found if c]

    one, swapped = on("GPU-0", "GPU-1"), on("GPU-1", "GPU-0")
    assert card(one, replace(one, run_id="x")) == [None, None]
    assert all(card(one, swapped))
    here = replace(on("GPU-0", "GPU-0"), environment=HERE[0])  # by an executor, with one slot
    plain = [replace(m, card="") for m in here.measurements]
    assert card(here, replace(here, run_id="z", measurements=tuple(plain))) == [None, None]
    alone = replace(one, run_id="y", environment=HERE[0])
    assert all(card(one, alone))
    assert [d.name for d in compare.runs(one, Study(alone)).differences] == ["GPU UUID"]


def test_several_machines_are_never_taken_for_one_of_them() -> None:
    limited = replace(HERE[1], hostname="b", gpu=replace(H200, uuid="GPU-1", power_limit_w=500.0))
    both = joined([HERE[0], limited])
    assert (both.card, both.hostname) == ("GPU-0, GPU-1", "b, node-7")
    assert both.gpu
    assert both.gpu.power_limit_share == pytest.approx(5 / 7)  # what the report states
    assert joined(HERE).card == "6 in all"
    assert joined(HERE[:1]) == HERE[0]
