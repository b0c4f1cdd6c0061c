"""The figures of a report: titles and drawn numbers agree, and none is larger than a screen."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.colors import to_hex

from harness import records
from harness.analysis.over_steps import course, mean_loss, running_mean
from harness.analysis.roofline import OTHER, OUTSIDE, Stack
from harness.analysis.study import Study
from harness.records import SAME_STEP, Case, Estimate, Measurement, Rule, Run, Suspect
from harness.report import context, figures
from harness.report.figures import PARTS, Picture, Row
from harness.report.profile import where_table
from harness.tests.fake_runs import case, run, sweep, timed, to, trained


def size(picture: Picture) -> tuple[int, ...]:
    """Width and height in pixels, from the header of the PNG."""
    return struct.unpack(">II", picture.png()[16:24])


def pictures(run: Run, **suite: Any) -> dict[str, Picture]:
    run = replace(run, suite=replace(run.suite, **suite))
    return {p.name: p for p in context.build(Study(run), Path("reports"))[1]}


def asks(metric: str, go: float = 1, **known: Any) -> tuple[Rule, ...]:
    return (Rule(name=metric, metric=metric, go=go, **known),)


def titles(picture: Picture) -> str:
    panels = (axes.get_title(loc="left") for axes in picture.figure.axes)
    return re.sub(r"\s", " ", picture.figure.get_suptitle() or "; ".join(panels))


def values(picture: Picture, panel: int = 0, marker: str = "oD") -> list[float]:
    """Where the dots of a panel are, from the first row down."""
    lines = [one for one in picture.figure.axes[panel].lines if str(one.get_marker()) in [*marker]]
    return [x for one in lines for x in numbers(one.get_xdata())]


def numbers(data: Any) -> list[float]:
    return [float(x) for x in data]


def test_a_figure_fits_on_a_screen_and_its_curves_have_names_of_their_own() -> None:
    grid: dict[str, Any] = {"shape": ["a", "b", "c"], "seq_len": [8192, 32768, 65536]}
    cases = [c for p in ("nsa", "dense") for c in sweep(provider=p, **grid)]
    seen = {"gpu_utilisation": 0.6, "cpu_utilisation": 1.0}
    growth = asks("scaling_exponent", 1.5, axis="seq_len")
    made = run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"]), telemetry=seen))
    labels = tuple((f"{axis} {x}", to(**{axis: x})) for axis in grid for x in grid[axis])

    for shown in (pictures(made, rules=growth), pictures(made, rules=growth, labels=labels)):
        assert {"scaling-train-seq-len", "utilisation"} <= shown.keys()
        assert all(
            a <= b for p in shown.values() for a, b in zip(size(p), (1300, 660), strict=True)
        )
        (legend,) = shown["scaling-train-seq-len"].figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert len({*names}) == len(names) == 4, "the asked one and those that differ least"
    assert "scaling-train-seq-len" not in pictures(made), "no rule asks for a growth"


def test_the_gpu_waits_in_as_many_cases_as_are_drawn_so() -> None:
    def measure(c: Case) -> list[Measurement]:
        busy = {512: 0.3, 1024: 0.74, 2048: 0.86, 4096: 0.5}[int(c.axes["seq_len"])]
        seen = {"gpu_utilisation": busy, "cpu_utilisation": 0.5 if busy == 0.5 else 1}
        return timed(c, 1e-3 * float(c.axes["seq_len"]), telemetry=seen)

    made = run(sweep(seq_len=[512, 1024, 2048, 4096]), measure)

    drawn = pictures(made, rules=asks("tokens_per_s"))["utilisation"]

    assert values(drawn) == pytest.approx([0.3, 0.5, 0.74, 0.86], rel=0.02)
    assert values(drawn, 1) == pytest.approx([1, 0.5, 1, 1], rel=0.02)
    assert titles(drawn) == drawn.alt == "GPU busy under 80 % in 3 of the 4 drawn"
    colours = [name.get_color() for name in drawn.figure.axes[0].get_yticklabels()]
    assert colours.count(figures.VERMILLION) == 1, "the case that decides the first rule"
    busy = run(made.suite.cases, lambda c: timed(c, 1, telemetry={"gpu_utilisation": 0.9}))
    assert "utilisation" not in pictures(busy, rules=asks("tokens_per_s"))


def test_speeds_stand_beside_what_was_seen_and_expected() -> None:
    def measure(c: Case) -> list[Measurement]:
        return timed(c, {"no": 0.01, "token": 20.0, "gc": 0.02}[str(c.axes["WITH"])], cv=0)

    made = run(sweep(seq_len=[512], WITH=["no", "gc", "token"]), measure)
    sides = [to(WITH=n) for n in ("no", "gc", "token")]
    tested = tuple(Suspect(name=str(n), without=sides[0], with_=sides[n]) for n in (1, 2))
    gap = records.Gap(metric="tokens_per_s", expected=500, seen=11, source="a report")

    drawn = pictures(made, suspects=records.Suspects(gap=gap, tested=tested))["speed"]

    assert values(drawn) == pytest.approx([25.6, 25600, 51200], rel=0.02)
    assert titles(drawn) == "1 of the 3 drawn below the 500 tokens/s expected: WITH=token"
    assert [one.get_xdata() for one in drawn.figure.axes[0].lines[-2:]] == [[11, 11], [500, 500]]
    low = records.Suspects(gap=replace(gap, expected=22), tested=tested)
    drawn = pictures(made, suspects=low)["speed"]
    (least,) = re.findall(r"make ([\d.]+) tokens/s or more; 11 tokens/s were seen", drawn.alt)
    assert float(least) == pytest.approx(values(drawn)[0], rel=0.005)


def test_a_provider_is_compared_with_the_faster_of_its_rivals() -> None:
    times = {"nsa": 1.0, "dense": 2.0, "split": 3.0}
    cases = [c for p in times for c in sweep(provider=p, seq_len=[512, 1024, 2048])]

    def measure(c: Case) -> list[Measurement]:
        grows = {512: 0.4, 1024: 1, 2048: 2}[int(c.axes["seq_len"])]
        return timed(c, 1e-3 * times[c.provider] * (1 if c.provider == "nsa" else grows), cv=0)

    rivals = replace(to(), criteria={"provider": ("dense", "split")})
    ours = to(provider="nsa")
    peer = records.Rule(name="a peer", metric="step_s", match=ours, high=0.5e-3)
    faster = asks("step_s", 3, match=ours, against=rivals)
    drawn = pictures(run(cases, measure), rules=faster, expectations=(peer,))["speed"]

    assert values(drawn) == pytest.approx([0.8, 2, 4], rel=0.02)
    who = "nsa is 0.8.* to 4.*x as fast as the faster of dense and split, ahead in 2 of the 3 drawn"
    met = "“needed: step_s” met in 1 of 3; “a peer” met in 0 of 3"
    assert re.fullmatch(f"{who}; {met}", titles(drawn))
    assert values(drawn, marker="|") == [3, 3, 3]
    assert values(drawn, marker="s") == pytest.approx([1.6, 4, 8], rel=0.02)


def test_losses_and_step_times_are_means_over_the_steps_with_what_happened() -> None:
    found = zip(("bf16", "fp16"), sweep(precision=["bf16", "fp16"]), strict=True)
    cases = [replace(c, axes={"precision": p}) for p, c in found]

    def measure(c: Case, steps: int = 200) -> list[Measurement]:
        fp16 = c.axes["precision"] == "fp16"
        how: dict[str, Any] = {"not_finite": {"grad_norm": (4,)}} if fp16 else {}
        how["loss"] = lambda n: 5.5 - n / 100 + 0.2 * fp16
        how["pace"] = lambda n: 1.0 if n < 120 else 0.8
        return [trained(m, steps=steps, **how) for m in timed(c, 0.05)]

    apart = asks("loss_last", match=to(precision="fp16"), against=to(precision="bf16"))

    drawn = pictures(run(cases, measure), rules=apart)["over-steps"]

    losses, times = drawn.figure.axes
    bf16, fp16 = ([*mean_loss(measure(c)).values()][150:] for c in cases)
    assert numbers(losses.lines[1].get_ydata())[-1] == pytest.approx((sum(fp16) - sum(bf16)) / 50)
    assert "loss against precision=bf16: precision=fp16 +5.3 %" in titles(drawn)
    assert [t.get_text().strip() for t in losses.texts] == ["step 4: fp16 overflow, update dropped"]
    assert not times.texts
    each = numbers(times.lines[0].get_ydata())
    assert numbers(times.lines[0].get_xdata()) == [*range(3, 201)], "the first steps compile"
    ends = numbers(re.findall(r"([\d.]+) ms", titles(drawn))[:2])
    assert ends == pytest.approx([median(each[:49]), median(each[-49:])], abs=0.06)

    single = pictures(run(cases[:1], measure))["over-steps"]
    said = numbers(re.findall(r"\d\.\d{3}", single.alt)[:2])
    curve = numbers(single.figure.axes[0].lines[1].get_ydata())
    assert said == pytest.approx([curve[0], curve[-1]], abs=6e-4)
    assert curve[-1] == pytest.approx(course(measure(cases[0])).last["loss"])  # type: ignore[union-attr]
    assert "over-steps" not in pictures(run(cases, lambda c: measure(c, 15)))
    assert "over-steps" not in pictures(run(cases, lambda c: timed(c, 0.05)))


def test_a_running_mean_is_of_the_last_part_of_a_curve() -> None:
    assert running_mean([1, 2, 3, 6], 2) == [1, 1.5, 2.5, 4.5]


def where(*found: Stack, asked: tuple[str, ...] = ()) -> Picture:
    drawn = figures.where(found, {s.case.case_id: "a long name, " * 5 for s in found}, asked)
    assert drawn is not None
    return drawn


def test_where_the_time_goes_adds_up_and_a_part_has_one_colour_everywhere() -> None:
    one, two = case({"seq_len": 512}), case({"seq_len": 1024})
    parts = {"select": 0.06, "gate": 0.0005, "norm": 0.01, OUTSIDE: 0.0295}
    long = Stack(case=one, step_s=0.1, parts=parts, note="as without replay")
    short = Stack(case=two, step_s=0.04, parts={"window": 0.03, OUTSIDE: 0.01}, note=SAME_STEP)

    table = where_table([long, short], {one.case_id: "paper shape", two.case_id: "short"})
    picture = where(long, short)

    assert table is not None
    assert table.columns == ("part", ">paper shape", ">short")
    assert table.rows[0] == ("window", "–", "30.0 ms (75 %)")
    assert table.remarks == ("paper shape: as without replay.",)
    assert titles(picture).endswith("name, : select runs for 60.0 ms of 100 ms (60 %)")
    widths = [bar.get_width() for bar in picture.figure.axes[0].patches]  # type: ignore[attr-defined]
    assert widths == pytest.approx([0.6, 0.0105 / 0.1, 0.295, 0.75, 0.25])
    (legend,) = picture.figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["select", "window", OTHER, OUTSIDE], "only parts that are drawn"
    looks = [(to_hex(b.get_facecolor()), b.get_hatch()) for b in legend.get_patches()]
    assert looks == [(to_hex(c), h) for c, h in (PARTS[name] for name in shown)]
    assert len({*PARTS.values()}) == len(PARTS)
    assert "window runs for 30.0 ms of 40.0 ms" in where(long, short, asked=(two.case_id,)).alt
    idle = replace(long, parts={"select": 0.01, OUTSIDE: 0.09})
    assert "no kernel runs for 90.0 ms" in where(idle).alt
    assert (where_table([], {}), figures.where([], {})) == (None, None)


def test_labels_of_parts_lie_inside_their_bars() -> None:
    parts = {name: 0.01 * (1 + i) for i, name in enumerate([*PARTS][:8])}
    figure = where(Stack(case=case({}), step_s=sum(parts.values()), parts=parts)).figure

    figure.draw_without_rendering()

    bars = [bar.get_window_extent() for bar in figure.axes[0].patches]
    labels = [t.get_window_extent() for t in figure.axes[0].texts if "%" in t.get_text()]
    assert labels
    assert all(any(b.x0 <= t.x0 and t.x1 <= b.x1 for b in bars) for t in labels)


def test_a_dot_has_its_interval_or_the_range_of_two_processes() -> None:
    three = Estimate(value=2, low=1.7, high=2.4, n=3, samples=9, each=(1.9, 2, 2.1))
    both = three, replace(three, n=2, each=(2.1, 1.9))
    rows = [Row("a", (e,), False, {}) for e in both]

    (axes,) = figures.dots("x", rows, [figures.Panel("x", str, {"needed": 3})], "").figure.axes

    bars = [of for one in axes.lines if len(of := numbers(one.get_xdata())) == 2]
    assert bars == [[1.7, 2.4], [1.9, 2.1], [3, 3]]
