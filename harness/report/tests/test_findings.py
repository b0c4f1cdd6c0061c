"""The sentences on axes and flags, in the report and on the command line."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.dead_axes import DeadAxis, Invariance, Oddities, oddities
from harness.analysis.summary import summarise
from harness.records import Case, Counters, Measurement, Outcome, Profile, Run, Scalar, TensorDigest
from harness.report import render as report
from harness.report.text import coverage_sentence, flag_sentences, oddity_sentences, without_code
from harness.tests.fake_runs import case, run, sweep, timed

DEAD = DeadAxis(
    workload="train",
    provider="nsa",
    axes=("NSA_FWE_Q",),
    values=((1,), (4,), (8,)),
    all_values=True,
    pairs=6,
    without_kernels=False,
    fastest=0.996,
    slowest=1.006,
    time_differs=False,
)
STILL = Invariance(
    group="forward/nsa",
    axis="seq_len",
    low=128,
    high=2048,
    metric="tokens_per_s",
    value=10.2,
    spread=0.012,
    growth=3.1,
    reached=True,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "`train/nsa`: `NSA_FWE_Q` has no effect (1, 4 and 8): the same operators, kernels, "
            "counters and outputs in 6 pairs of cases; step time -0.40 % to +0.60 %.",
        ),
        ({"all_values": False}, "`NSA_FWE_Q`: 1, 4 and 8 do the same:"),
        ({"without_kernels": True}, "counters and outputs, kernels unknown without a GPU, in 6"),
        ({"time_differs": True, "fastest": 0.8}, "only the step time differs (-20 % to +0.60 %)."),
        (
            {"axes": ("V2", "PACK"), "values": ((1, 0), (1, 1)), "pairs": 1},
            "`V2`, `PACK` has no effect (1, 0 and 1, 1): the same operators, kernels, counters "
            "and outputs in 1 pair of cases;",
        ),
        (
            {"provider": "", "axes": ("provider",), "values": (("a",), ("b",))},
            "`train`: providers a and b do the same:",
        ),
    ],
)
def test_a_dead_axis_in_words(changes: dict[str, Any], said: str) -> None:
    (sentence,) = oddity_sentences(Oddities(dead=(replace(DEAD, **changes),)))
    assert said in sentence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "`forward/nsa`: 10.2 tokens/s from `seq_len` 128 to 2048, within 1.2 %, though a token "
            "costs 3.1x the FLOPs: a fixed cost per token decides.",
        ),
        ({"reached": False}, "nothing shows that the axis reached the workload."),
        ({"growth": 1.0, "reached": False}, "within 1.2 %: nothing shows"),
        ({"growth": None, "reached": False}, "within 1.2 %: nothing shows"),
        (
            {"metric": "step_s", "value": 0.05, "growth": 4.0},
            "the step takes 50 ms from `seq_len` 128 to 2048, within 1.2 %, though it needs 4.0x "
            "the FLOPs: a fixed cost decides.",
        ),
    ],
)
def test_a_speed_that_does_not_move_in_words(changes: dict[str, Any], said: str) -> None:
    (sentence,) = oddity_sentences(Oddities(still=(replace(STILL, **changes),)))
    assert said in sentence


def test_alike_ones_of_several_providers_and_groups_are_one_sentence() -> None:
    dead = (DEAD, replace(DEAD, provider="dense", pairs=2, slowest=1.3, time_differs=True))
    still = (STILL, replace(STILL, group="forward/dense"), replace(STILL, group="forward/x"))

    first, second = oddity_sentences(Oddities(dead=dead, still=still))

    assert first.startswith("`train/nsa`, `train/dense`: `NSA_FWE_Q` has no effect")
    assert "in 8 pairs of cases; only the step time differs (-0.40 % to +30 %)." in first
    assert second.endswith("decides. So in 2 more groups.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"pairs": 3}, "Whether an axis has no effect is not known:"),
        (
            {"pairs": 3, "compared": 3},
            "3 pairs of cases that differ in one axis were compared, and each",
        ),
        (
            {"pairs": 5, "compared": 3, "dead": (DEAD,)},
            "were compared; too little is known of 2 more.",
        ),
    ],
)
def test_what_could_not_be_compared_is_told(changes: dict[str, Any], said: str) -> None:
    assert said in coverage_sentence(Oddities(**changes))
    assert bool(said) == bool(coverage_sentence(Oddities(**changes)))


# --- of a run ----------------------------------------------------------------------------


def ignoring(cases: Sequence[Case], **changes: Any) -> Run:
    """A run in which every case did the same."""
    counters = Counters(dispatched_ops=100, steps=2)
    digest = TensorDigest(name="loss", dtype="float32", shape=(), norm=1.0, projection=1.0)
    same = {
        "counters": counters,
        "census": Profile(fingerprint="abc"),
        "output_digest": (digest,),
        **changes,
    }
    return run(cases, lambda c: timed(c, 0.05, processes=2, **same))


def test_the_report_and_the_command_line_say_it(tmp_path: Path) -> None:
    recorded = ignoring(sweep(flag=[0, 1]))

    paths = report.write(recorded, tmp_path, date=datetime.date(2026, 11, 21))
    text = paths.markdown.read_text()
    ran = text.partition("\n## What ran\n")[2].partition("\n## ")[0]

    assert "- `train/nsa`: `flag` has no effect (0 and 1): the same operators" in ran
    assert "- Odd: no effect of `flag`; see What ran." in text
    (plain,) = without_code(oddities(recorded, summarise(recorded)))
    assert plain.startswith("train/nsa: flag has no effect (0 and 1)")


def test_a_run_that_cannot_tell_says_so_in_one_line(tmp_path: Path) -> None:
    recorded = run(sweep(flag=[0, 1]), lambda c: timed(c, 0.05))

    text = report.write(recorded, tmp_path, date=datetime.date(2026, 11, 21)).markdown.read_text()

    assert "Whether an axis has no effect is not known: no two cases" in text
    assert "Odd:" not in text


def with_flags(
    env: dict[str, str], read: dict[str, bool], outcome: Outcome = Outcome.OK
) -> tuple[str, ...]:
    axes: dict[str, Scalar] = {"seq_len": 512}
    c = case(axes, env=env)

    def measure(c: Case) -> list[Measurement]:
        if outcome is Outcome.OK:
            return timed(c, 0.05, flags_read=read)
        return [Measurement(case_id=c.case_id, process=0, outcome=outcome)]

    return flag_sentences(run([c], measure))


def test_flags_are_told_by_what_is_known_of_them() -> None:
    said = with_flags(
        {"NSA_USE_FA2": "1", "OMP_NUM_THREADS": "4"}, {"NSA_USE_FA2": True, "NSA_TB_DISABLE": False}
    )

    assert said == (
        "Set by cases, and asked for by what ran: `NSA_USE_FA2`.",
        "Set by cases, and nobody can tell whether they were read: `OMP_NUM_THREADS`.",
        "Exported around the run, and asked for by no case: `NSA_TB_DISABLE`.",
    )


def test_without_flags_or_without_an_answer_nothing_is_said_of_them() -> None:
    assert with_flags({}, {}) == ()
    assert with_flags({"A": "1"}, {}, Outcome.CRASH) == ()
