"""What explains a gap: a planted cause is found, and nothing innocent is accused."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.analysis.suspects import Candidate, Conclusion, Diagnosis, diagnose, fingerprint
from harness.records import Case, Gap, Measurement, Observation, Outcome, Suspect, Suspects
from harness.report import explained
from harness.tests.fake_runs import case, ended, run, sweep, timed, to

RULED_OUT, CONTRIBUTES, UNDECIDED, ENOUGH, APART, WAS_OFF, NOT_TESTED = Conclusion

GAP = Gap(metric="tokens_per_s", expected=500, seen=50, source="s")
FLAGS: dict[str, Any] = {"gc": ("off", "on"), "loop": (0, 1)}
TESTED = (
    Suspect(name="gc", without=to(gc="off"), with_=to(gc="on")),
    Suspect(name="loop", without=to(loop=0), with_=to(loop=1), remedy="LOOP=0"),
    Suspect(name="base", control=to(provider="dense", loop=0)),
)
CASES = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512, 2048], **FLAGS)]


def diagnosed(
    slower: dict[str, float],
    *,
    gap: Gap = GAP,
    then: dict[str, str] | None = None,
    processes: int = 3,
    cv: float = 0.005,
    dense_s: float = 0.1,
    failed: dict[str, Any] | None = None,
) -> dict[str, Diagnosis]:
    """Each flag that is on slows a step by its factor; a step of 512 tokens takes 1 s else."""

    def measure(c: Case) -> list[Measurement]:
        if failed and to(**failed).accepts(c):
            return ended(c, Outcome.CRASH, detail="boom")
        step = dense_s if c.provider == "dense" else float(c.axes["seq_len"]) / 512
        for flag, by in slower.items():
            on = c.axes[flag] in ("on", 1)
            # What slows short rows ten times as much, says nothing of long ones.
            step *= by if on and c.axes["seq_len"] == 512 else 1.0
        return timed(c, step, processes=processes, cv=cv, tokens=int(c.axes["seq_len"]))

    tested = tuple(replace(s, then=(then or {}).get(s.name, s.then)) for s in TESTED)
    asked = Suspects(gap=gap, tested=tested, not_tested=("the A100",))
    made = run(CASES, measure, suspects=asked)
    return {d.name: d for d in diagnose(made.suite, summarise(made))}


HERE = replace(GAP, where=to(seq_len=512))


@pytest.mark.parametrize(
    ("by", "conclusion"),
    [(1.0, RULED_OUT), (1.3, RULED_OUT), (3.0, CONTRIBUTES), (20.0, ENOUGH), (10.0, CONTRIBUTES)],
)
def test_the_planted_cause_is_found_and_the_other_flag_is_not_accused(
    by: float, conclusion: Conclusion
) -> None:
    found = diagnosed({"loop": by}, gap=HERE)

    assert (found["loop"].conclusion, found["gc"].conclusion) == (conclusion, RULED_OUT)
    assert (found["loop"].share is not None) == (conclusion is CONTRIBUTES)
    if conclusion is ENOUGH:
        assert found["loop"].remedy == "LOOP=0"
        assert found["loop"].reached == pytest.approx(512 / by, rel=0.05)


@pytest.mark.parametrize(("expected", "conclusion"), [(20, ENOUGH), (5, UNDECIDED)])
def test_a_case_far_above_what_was_expected_explains_nothing_by_itself(
    expected: float, conclusion: Conclusion
) -> None:
    """It makes 25.6 tokens/s here with the loop; the GPU of the gap may be slower, but not by 5."""
    modest = replace(HERE, expected=expected, seen=expected / 10)

    assert diagnosed({"loop": 20.0}, gap=modest)["loop"].conclusion is conclusion


def test_a_share_is_of_the_logarithm_of_the_gap() -> None:
    low, high = diagnosed({"gc": 10**0.5}, gap=HERE)["gc"].share or (0.0, 0.0)

    assert 0.45 < low < 0.5 < high < 0.55


def test_an_effect_is_taken_where_the_gap_was_seen() -> None:
    """Over all lengths the pairs disagree, and the interval spans them."""
    found = [diagnosed({"loop": 20.0}, gap=gap)["loop"].conclusion for gap in (HERE, GAP)]

    assert found == [ENOUGH, UNDECIDED]


@pytest.mark.parametrize(
    ("dense_s", "conclusion"), [(0.1, RULED_OUT), (3.0, CONTRIBUTES), (512 / 500, UNDECIDED)]
)
def test_a_control_that_does_as_expected_rules_out_what_it_shares(
    dense_s: float, conclusion: Conclusion
) -> None:
    assert diagnosed({}, gap=HERE, dense_s=dense_s)["base"].conclusion is conclusion


@pytest.mark.parametrize("options", [{"processes": 1}, {"failed": {"loop": 1}}])
def test_without_intervals_or_pairs_nothing_is_concluded(options: dict[str, Any]) -> None:
    found = diagnosed({"loop": 20.0}, gap=HERE, **options)

    assert found["loop"].conclusion is NOT_TESTED
    assert found["the A100"].conclusion is NOT_TESTED


def test_a_small_gap_is_not_explained() -> None:
    assert not diagnosed({}, gap=replace(GAP, seen=490))


def test_a_gap_in_time_is_above_what_was_expected() -> None:
    late = Gap(metric="step_s", expected=1.0, seen=10.0, source="s", where=to(seq_len=512))

    found = diagnosed({"loop": 20.0}, gap=late)

    assert late.factor == pytest.approx(10)
    assert [found[n].conclusion for n in ("loop", "gc", "base")] == [ENOUGH, RULED_OUT, RULED_OUT]


@pytest.mark.parametrize(
    ("by", "seen", "then", "conclusion"),
    [
        (20.0, 25, "on", ENOUGH),  # the case of that day makes 25.6 tokens/s here
        (20.0, 25, "off", WAS_OFF),
        (20.0, 5, "on", APART),
        (4.0, 20, "unknown", APART),  # 6 times
    ],
)
def test_what_was_off_or_does_not_reproduce_the_gap_is_no_cause_of_it(
    by: float, seen: float, then: str, conclusion: Conclusion
) -> None:
    of_that_day = to(provider="nsa", loop=1, gc="off")
    gap = replace(HERE, expected=10 * seen, seen=seen, then=of_that_day)

    found = diagnosed({"loop": by}, gap=gap, then={"loop": then})["loop"]

    assert (found.conclusion, found.then, found.share) == (conclusion, then, None)


OVER_T = Observation(metric="tokens_per_s", seen=1.0, at=to(seq_len=2048), over=to(seq_len=512))
SPEED = Observation(metric="tokens_per_s", seen=51.0)
BUSY = Observation(metric="gpu_utilisation", seen=0.29)
OFF = Suspect(name="off", then="off", without=to(loop=0), with_=to(loop=1))
LOOP, BATCH = (replace(OFF, name=n, then="on", with_=to(loop=i)) for n, i in (("loop", 1), ("", 0)))
SEEN_CASES = [*sweep(seq_len=[512, 2048], loop=[0, 1]), case({"other": 1})]


def candidates(
    *observed: Observation, seen: float = 11.0, pace: float = 1.0
) -> tuple[tuple[Candidate, ...], str]:
    """A loop makes 25.6 tokens/s at any length, 20 % busy; a batch takes 0.1 s, 90 % busy."""

    def measure(c: Case) -> list[Measurement]:
        tokens, loop = int(c.axes.get("seq_len", 1)), c.axes.get("loop")
        telemetry = {"gpu_utilisation": 0.2 if loop else 0.9}
        return timed(
            c, tokens / 25.6 if loop else 0.1, tokens=tokens, cv=0.001, telemetry=telemetry
        )

    gap = Gap(metric="tokens_per_s", expected=500, seen=seen, where=to(seq_len=512), source="s")
    suspects = Suspects(gap=gap, tested=(OFF, BATCH, LOOP), observed=observed)
    of = Study(run(SEEN_CASES, measure, suspects=suspects))
    found = fingerprint(of.run, of.summaries, {c.case_id: pace for c in SEEN_CASES})
    assert found is not None
    return found.candidates, explained.fingerprint_sentence(found, of.names, of.run.suite)


def test_only_what_does_as_was_seen_agrees() -> None:
    (loop, batch), said = candidates(OVER_T, BUSY)

    assert (loop.suspects, loop.agrees) == (("loop",), (True, True, True))
    assert (batch.against, batch.agrees) == ([0, 1, 2], (False, False, False))
    assert said == "Only loop agrees with all that was measured here, 3 of 3 observations."
    assert candidates(BUSY, seen=52.0)[1].endswith("; none makes 52 tokens/s.")
    assert candidates(OVER_T, BUSY, pace=2.0)[0][0].agrees == (False, True, True), "a slow host"
    (loop, batch), said = candidates(replace(OVER_T, seen=1.6), replace(BUSY, seen=0.9))
    assert (loop.against, batch.against) == ([1, 2], [0, 1]), "it fits better, with the gap itself"
    assert "1 of 3 observations, not with tokens/s, seq_len=2048 over seq_len=512 and GPU" in said


@pytest.mark.parametrize(
    ("observed", "agrees"),
    [
        (replace(BUSY, seen=0.79), True),  # a slower GPU is busy for longer
        (replace(BUSY, seen=0.81), False),
        (replace(BUSY, seen=0.12), False),  # not twice as busy, though
        (replace(SPEED, seen=6.3), False),
        (replace(SPEED, seen=6.5), True),  # a slower GPU makes fewer tokens/s
        (replace(SPEED, seen=52.0), False),
        (replace(OVER_T, seen=1.6), False),
        (replace(OVER_T, at=to(seq_len=4096)), None),  # not measured
        (replace(BUSY, metric="gpu_memory_bytes"), None),
    ],
)
def test_a_number_far_from_what_was_seen_disagrees(
    observed: Observation, agrees: bool | None
) -> None:
    loop = next(c for c in candidates(observed)[0] if c.suspects == ("loop",))

    assert (loop.here[1] is None) == (agrees is None)
    assert loop.agrees[1] is bool(agrees)
