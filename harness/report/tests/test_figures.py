"""The figures of a report: what they show, and that none is larger than a screen."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.roofline import OUTSIDE, REST, Stack
from harness.analysis.statistics import less
from harness.records import SAME_STEP, Case, Estimate, Match, Measurement, Rule, Run
from harness.report import context, figures
from harness.report.figures import Picture
from harness.report.profile import where_table
from harness.tests.fake_runs import case, run, sweep, timed, trained

SCREEN = 1300, 660


def size(picture: Picture) -> tuple[int, ...]:
    """Width and height in pixels, from the header of the PNG."""
    return struct.unpack(">II", picture.png()[16:24])


def pictures(run: Run) -> dict[str, Picture]:
    return {p.name: p for p in context.build(run, Path("reports"))[1]}


def measured(cases: Sequence[Case], **channels: float) -> Run:
    return run(cases, lambda c: timed(c, float(c.axes["seq_len"]) * 1e-4, telemetry=channels))


def test_a_figure_fits_on_a_screen() -> None:
    cases = [
        case({"shape": f"heads of {h}", "seq_len": n}, provider=provider)
        for h in range(3)
        for n in (8192, 32768, 65536)
        for provider in ("nsa", "dense")
    ]

    shown = pictures(measured(cases, gpu_utilisation=0.9, cpu_utilisation=1, gpu_power_w=500))

    assert {"scaling-train-seq-len", "utilisation"} <= shown.keys()
    assert all(a <= b for p in shown.values() for a, b in zip(size(p), SCREEN, strict=True))


def test_curves_that_do_not_fit_are_left_to_the_table() -> None:
    few, many = (measured(sweep(seq_len=[512, 1024, 2048], batch=range(n))) for n in (2, 7))

    assert "scaling-train-seq-len" in pictures(few)
    assert "scaling-train-seq-len" not in pictures(many)


@pytest.mark.parametrize(
    ("rules", "label"),
    [
        ((Rule(name="r", metric="step_s", go=1, match=Match(criteria={"gc": ("off",)})),),
         "Slowest judged case a token: nsa, seq_len=1024, gc=off"),
        ((), "Slowest case a token: nsa, seq_len=1024, gc=on"),
    ],
)  # fmt: skip
def test_utilisation_is_that_of_the_slowest_judged_case(
    rules: tuple[Rule, ...], label: str
) -> None:
    def measure(c: Case) -> list[Measurement]:
        step_s = float(c.axes["seq_len"]) ** 2 * 1e-7 * (2 if c.axes["gc"] == "on" else 1)
        return timed(c, step_s, telemetry={"gpu_utilisation": 0.6, "cpu_utilisation": 1})

    recorded = run(sweep(seq_len=[512, 1024], gc=["off", "on"]), measure)

    shown = pictures(replace(recorded, suite=replace(recorded.suite, rules=rules)))

    assert shown["utilisation"].alt.startswith(f"{label}; Process 0, on average: GPU busy ")


def test_a_sampling_too_short_for_the_gpus_counter_has_no_figure() -> None:
    def measure(c: Case) -> list[Measurement]:
        seen = timed(c, 1e-3, telemetry={"gpu_utilisation": 0.6, "cpu_utilisation": 1})
        *before, last = seen[0].phases  # sampling lasts two seconds there
        short = replace(last, end_s=last.start_s + 0.5)
        return [replace(m, phases=(*before, short)) for m in seen]

    assert "utilisation" not in pictures(run(sweep(seq_len=[512, 1024]), measure))


def test_losses_and_speeds_are_curves_over_the_steps() -> None:
    cases = sweep(prefill=["batched", "token"])
    made = run(cases, lambda c: [trained(m) for m in timed(c, 0.05)])
    short = run(cases, lambda c: [trained(m, steps=3) for m in timed(c, 0.05)])
    smoke = run(cases, lambda c: [trained(m, steps=20) for m in timed(c, 0.05)])
    first, rest = cases[0].case_id, made.measurements
    mixed = [m for m in (*smoke.of(first), *rest) if (m in rest) == (m.case_id != first)]

    drawn = pictures(made)["over-steps"]

    assert size(drawn) <= (1300, 660)
    assert drawn.alt.endswith("loss 5.314 to 3.585 in 200 steps")
    of_two = pictures(replace(made, measurements=tuple(mixed)))["over-steps"].alt
    assert of_two.startswith("nsa, prefill=token"), "only the longest runs are drawn"
    assert "over-steps" not in pictures(short)
    assert "over-steps" not in pictures(run(cases, lambda c: timed(c, 0.05)))


def test_where_the_time_goes_has_a_row_a_part_and_a_bar_a_case() -> None:
    one = case({"seq_len": 512})

    def of(value: float, half: float) -> Estimate:
        low, high = value - half, value + half
        return Estimate(value=value, low=low, high=high, processes=3, samples=60)

    parts = {"select": 0.06, "gate": 0.0005, OUTSIDE: 0.0395}
    found = [
        Stack(case=one, step_s=0.1, parts=parts, note="as without replay"),
        Stack(case=one, step_s=0.04, parts={"select": 0.03, "window": 0.012}, alone=True),
        Stack(case=one, step_s=0.04, parts={"select": 0.004}, note=f"{SAME_STEP}, but for 1"),
        Stack(case=one, step_s=0.04, parts={"select": 0.004}, note=SAME_STEP),
        Stack(
            case=one,
            step_s=0.1,
            parts={"select": 0.03, "window": -0.001, REST: 0.071},
            added={
                "select": less(of(0.1, 0.002), of(0.07, 0.001)),
                "window": less(of(0.1, 0.002), of(0.101, 0.003)),
            },
        ),
    ]
    names = {one.case_id: "paper shape"}

    table, picture = where_table(found, names), figures.where(found, names)

    assert table is not None
    assert [row[0] for row in table.rows] == ["select", "window", OUTSIDE, REST, "**step**"]
    assert [row[1] for row in table.rows] == [
        "60.0 ms (60 %)",
        "–",
        "39.5 ms (40 %)",
        "–",
        "100 ms",
    ]
    assert [row[5] for row in table.rows[:2]] == [
        "30.0 ms [28.3 … 31.7] (30 %)",
        "-1.00 ms, may be 0 (-1 %)",
    ]
    assert table.remarks[:2] == ("All: paper shape.", "paper shape: as without replay.")
    assert "sum less whole 2.00 ms (5 %)" in table.remarks[2]
    assert "The other 71.0 ms (71 %) are the rest of the model" in table.remarks[3]
    assert table.remarks[4:] == ()
    assert picture is not None
    assert picture.alt == "paper shape: 60 % of 100 ms are select"
    assert figures.where(found[4:], names).alt == "paper shape: 30 % of 100 ms are select"  # type: ignore[union-attr]
    assert where_table([], {}) is None
    assert figures.where([], {}) is None
