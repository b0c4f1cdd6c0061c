"""What changed since an earlier run, and by which name a run's page is counted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.study import Study
from harness.cli import report as command
from harness.errors import HarnessError
from harness.records import (
    Breakdown,
    Case,
    Environment,
    Git,
    Gpu,
    Measurement,
    Outcome,
    Profile,
    Rule,
    Run,
    Stop,
)
from harness.report import context, endings
from harness.report.series.since import Since
from harness.store import reader
from harness.tests.fake_runs import H200, case, ended, environment, run, sweep, timed, to
from harness.tests.stored_runs import A100, CASES, dated, record, store

STEPS: dict[str, float | Outcome] = {
    "quicker": 0.01,
    "slower": 0.01,
    "same": 0.01,
    "mended": Outcome.CRASH,
    "broken": 0.01,
    "still": Outcome.HANG,
}


def measured(steps: Mapping[str, float | Outcome], *, gpu: Gpu = H200, **changes: Any) -> Run:
    """A run of one case a name."""

    def measure(c: Case) -> list[Measurement]:
        step = steps[str(c.axes["what"])]
        return ended(c, step) if isinstance(step, Outcome) else timed(c, step, cv=0.001)

    return run(sweep(what=[*steps]), measure, env=environment(gpu=gpu), **changes)


def built(now: Run, before: Run) -> dict[str, Any]:
    """What the template of its report prints."""
    return context.build(Study(now), Path("reports"), Study(before))[0]


def compared(now: Run, before: Run) -> Since:
    since: Since = built(now, before)["since"]
    return since


def section(now: Run, before: Run) -> str:
    since = compared(now, before)
    return "\n".join((since.head, *since.bullets))


def test_a_report_says_what_fails_and_what_is_slower_now_and_shows_what_was_decided() -> None:
    before = measured(STEPS, run_id="before")
    now = measured(
        {**STEPS, "quicker": 0.005, "slower": 0.02, "mended": 0.01, "broken": Outcome.CRASH}
    )

    text = section(now, before)

    failed = [one for one in text.splitlines() if one.startswith("**Failed now**")]
    assert failed == ["**Failed now**: nsa, what=broken (crash, ok before)."]
    assert "6 cases in both runs; 1 slower; 1 faster; 1 moved by less than 10 %" in text
    assert "; 3 not compared (the baseline failed: 1; crash, ok before: 1; hang: 1)." in text
    assert "The node is the same" in text
    rows = [(row[0], row[-1]) for row in compared(now, before).decided.rows]
    assert sorted(rows) == [("nsa, what=quicker", "faster"), ("nsa, what=slower", "slower")]


def test_a_changed_node_is_named_and_widens_every_interval() -> None:
    before = measured({"x": 0.0100, "y": 0.0100, "z": 0.0100}, run_id="before")
    other = replace(H200, uuid="A, B", driver="590.1", power_limit_w=600.0)
    steps = {"x": 0.0106, "y": 0.0101, "z": 0.0102}

    same_node = section(measured(steps), before)
    other_node = section(measured(steps, gpu=other), before)

    assert "GPU UUID GPU-5d1e0f4c…, now A and B; driver 570.124.06, now 590.1" in other_node
    assert "power limit (W) 700.0, now 600.0" in other_node
    assert "; 1 slower; " in same_node
    assert "2 moved by less than 10 %; 1 not known within 10 %" in other_node
    assert "the variation between cards: ±7.56 % by themselves" in other_node
    assert "the variation between days" in same_node


LESS_POWER: dict[str, Any] = {"power_limit_w": 500.0}
SLOW = environment(gpu=replace(H200, **LESS_POWER))


def moved(
    node: dict[str, Any], nsa: float, dense: float, rules: Sequence[Rule] = ()
) -> tuple[Run, Run]:
    """A run, and a later one on another node that takes so many times as long."""
    both = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512])]
    by = {"nsa": nsa, "dense": dense}
    before = run(both, lambda c: timed(c, 0.01), run_id="before")
    env = environment(gpu=replace(H200, **node))
    return run(both, lambda c: timed(c, 0.01 * by[c.provider]), env=env, rules=rules), before


def test_what_made_every_provider_slower_alike_is_the_node_if_that_changed() -> None:
    text = section(*moved(LESS_POWER, nsa=1.2, dense=1.3))

    assert "**Slow host: steps on average 1.20x (nsa) and 1.30x (dense) those of" in text
    assert "2 slower as this host is" in text
    assert "; 1 slower" not in text


@pytest.mark.parametrize(
    ("node", "nsa", "dense"),
    [
        ({}, 1.3, 1.3),  # nothing of the node is known to have changed
        (LESS_POWER, 1.3, 1.0),  # dense did not move: the code did
        (LESS_POWER, 1.6, 1.1),  # what both share does not explain the first
        (LESS_POWER, 1.3, 0.8),
    ],
)
def test_a_new_node_does_not_excuse_code(node: dict[str, Any], nsa: float, dense: float) -> None:
    text = section(*moved(node, nsa, dense))

    assert re.search(r"; \d slower[;.]", text)
    assert "low host" not in text


@pytest.mark.parametrize(
    ("limit_s", "abort_s", "node", "answer"),
    [
        (0.0105, 1.0, LESS_POWER, "open"),
        (0.0095, 1.0, LESS_POWER, "no"),
        (0.0105, 1.0, {}, "no"),
        (0.0105, None, LESS_POWER, "no"),  # a NO-GO
    ],
)
def test_a_limit_missed_by_no_more_than_the_host_is_slower_is_open(
    limit_s: float, abort_s: float | None, node: dict[str, Any], answer: str
) -> None:
    """Dense takes 13 ms on a host that is 1.3 times as slow for it."""
    rule = Rule(name="fast", match=to(provider="dense"), metric="step_s", go=limit_s, abort=abort_s)

    now, before = map(Study, moved(node, 1.2, 1.3, [rule]))
    page: dict[str, Any] = context.build(now, Path("reports"), before)[0]

    assert f"; {answer}: fast" in page["status"]
    assert (", after 3 " in str([*endings.verdict_lines(now)])) is (answer == "open"), "the screen"
    assert ("on a host that is not slow" in str(page["next_steps"])) is (answer == "open")


def test_less_power_explains_busy_steps_beside_one_that_waits() -> None:
    cases = [*sweep(seq_len=[512, 1024]), *sweep(provider="dense", seq_len=[512]), case({"n": 1})]
    busy = [{"gpu_utilisation": 0.99 if c is not cases[3] else 0.1} for c in cases]

    def taken(times: float) -> Callable[[Case], list[Measurement]]:
        return lambda c: timed(c, 0.01 * times, cv=0.001, telemetry=busy[cases.index(c)])

    said = compared(run(cases, taken(1.25), env=SLOW), run(cases, taken(1.0), run_id="before"))
    assert (said.regressed, bool(said.node)) == ("", True)


def test_the_first_screen_says_how_many_regressed_and_the_worst() -> None:
    def first(**now: float | Outcome) -> str:
        steps: dict[str, float | Outcome] = {"x": 0.01, "y": 0.01}
        rules = [Rule(name="loose", metric="step_s", go=1.0)]
        before = measured(steps, rules=rules, run_id="before")
        answers = built(measured({**steps, **now}, rules=rules), before)["answers"]
        return "".join(a for a in answers if "Regressed" in a)

    assert first(x=0.005) == first() == ""
    slower = first(x=0.02)
    assert slower.startswith("**Regressed since 2026-11-21**: nsa, what=x: 2.0")
    assert slower.endswith("] slower.")
    both = first(x=0.02, y=Outcome.CRASH)
    assert both == "**Regressed since 2026-11-21**: 2, worst: nsa, what=y (crash, ok before)."


def test_versions_count_full_runs_and_the_newest_on_this_gpu_model_is_compared(
    tmp_path: Path,
) -> None:
    """Of six runs of a store, each an hour after the one before."""
    runs = tmp_path / "runs"
    filtered = environment(command=("harness", "run", "retest", "--filter", "x"))
    whole = run(CASES, lambda c: timed(c, 0.01))
    ids = [
        record(runs),
        record(runs, gpu=A100),
        record(runs, finish=False),
        store(runs, replace(whole, environment=filtered)),
        record(runs, suite="other"),
        record(runs, step_s=0.012),
    ]
    for hour, run_id in enumerate(ids):
        dated(runs, run_id, f"2026-11-21T0{hour}:00:00+00:00")
    first, _, _, partial, _, last = ids

    page = command.written(Study(reader.load(runs, last)), tmp_path)
    again = command.written(Study(reader.load(runs, last)), tmp_path)
    part = command.written(Study(reader.load(runs, partial)), tmp_path, against="none")

    assert page.stem.endswith("A100 Retest v3"), "after one on this GPU and one on another"
    assert again.stem.endswith("v3.1")
    assert part.stem.endswith(f"partial {partial[-4:]}")
    text = page.read_text(encoding="utf-8")
    assert f"--against {first}  #" in text
    assert f"Compared with run `{first}`" in text
    assert "## Since the last report" not in part.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "lacks",
    [
        {"ended_at": ""},
        {"stopped": Stop(rule="r")},
        {"environment": environment(command=("harness", "compare", "a", "b"))},
        {"environment": environment(command=("harness", "run", "x", "--set=gc=on"))},
        {"environment": environment(command=("harness", "run", "x", "-f", "y"))},
        {"environment": environment(command=("harness", "run", "x", "-sgc=on"))},
    ],
)
def test_a_run_that_lacks_cases_is_not_full(lacks: dict[str, Any]) -> None:
    whole = run(CASES, lambda c: timed(c, 0.01))
    more = environment(command=("harness", "run", "x", "-s", "measure.processes=3"))

    assert reader.is_full(whole)
    assert reader.is_full(replace(whole, environment=more))
    assert not reader.is_full(replace(whole, **lacks))


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    with pytest.raises(HarnessError, match="is the run itself"):
        command.written(Study(reader.load(runs, record(runs))), tmp_path, against="latest")

    assert list(tmp_path.glob("*.md")) == []


def test_a_slow_host_is_the_node_even_where_the_gpu_kept_its_speed() -> None:
    """As many cases wait for the GPU as for the host, so that no mean over all of them is alike."""
    names, lengths = ("nsa", "dense"), (512, 2048, 4096, 8192)
    both = [c for p in names for c in sweep(provider=p, seq_len=[*lengths])]
    other = environment(gpu=replace(H200, uuid="GPU-other"))

    def text(env: Environment, dense: float = 1.9) -> str:
        def taken(c: Case, slower: Mapping[str, float]) -> list[Measurement]:
            waits = c.axes["seq_len"] == 512 or c.provider == "dense"
            busy = {"gpu_utilisation": 0.3 if waits else 0.99}
            return timed(c, 0.01 * (slower[c.provider] if waits else 1.0), telemetry=busy)

        before = run(both, lambda c: taken(c, dict.fromkeys(names, 1.0)), run_id="before")
        return section(run(both, lambda c: taken(c, {"nsa": 2.0, "dense": dense}), env=env), before)

    assert "Slow host: host-bound steps on average 2.0x (nsa) and 1.90x (dense)" in text(other)
    assert "low host" not in text(other, dense=1.0) + text(environment())


@pytest.mark.parametrize(("kernels_s", "regressed"), [(0.09, False), (0.10, True)])
def test_a_busy_case_regressed_if_its_kernels_did(kernels_s: float, regressed: bool) -> None:
    """On a host that is half as fast, 90 ms of kernels and 10 ms of the host take 110 ms."""
    both = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512, 2048])]

    def taken(c: Case, host: float, kernels_s: float) -> list[Measurement]:
        busy_s, host_s = (kernels_s, 0.01) if c is both[1] else (0.01, 0.09)
        work = Breakdown(step_s=busy_s + host * host_s, device_busy_s=busy_s)
        profile = Profile(breakdown=work) if host > 1 else None
        busy = {"gpu_utilisation": busy_s / work.step_s} if host > 1 or c.provider == "nsa" else {}
        return timed(c, work.step_s, cv=0.001, profile=profile, telemetry=busy)

    before = run(both, lambda c: taken(c, 1.0, 0.09), run_id="before")
    said = compared(run(both, lambda c: taken(c, 2.0, kernels_s), env=SLOW), before)

    assert ("nsa, seq_len=2048: 1.20" in said.regressed) is regressed
    assert said.node.startswith("slow host: host-bound steps on average 1.9")
    assert f"; {3 + (not regressed)} slower as this host is" in said.bullets[-1]


@pytest.mark.parametrize(("busy_s", "host"), [(0.0041, True), (0.0060, False), (None, False)])
def test_a_slower_step_whose_kernels_take_as_long_as_before_is_the_host(
    busy_s: float | None, host: bool
) -> None:
    (case,) = sweep(seq_len=[512])

    def taken(step_s: float, busy_s: float | None) -> list[Measurement]:
        work = Breakdown(step_s=step_s, device_busy_s=busy_s)
        return timed(case, step_s, profile=Profile(steps=2, wall_s=0.1, breakdown=work))

    before = run([case], lambda _: taken(0.010, 0.0040), run_id="before")
    now = run([case], lambda _: taken(0.020, busy_s))
    elsewhere = replace(now, environment=environment(gpu=replace(H200, uuid="GPU-other")))

    said = compared(now, before).regressed
    assert ("though its kernels still take 4.10 ms: the host." in said) is host
    steps, others = (str(built(r, before)["next_steps"]) for r in (now, elsewhere))
    assert "harness bisect" in steps, "the host may run other code"
    assert ("harness bisect" in others) is not host


@pytest.mark.parametrize(
    ("first", "regressed"), [(0.014, ""), (0.023, "seq_len=256"), (Outcome.CRASH, "crash")]
)
def test_a_slow_node_excuses_no_crash_and_no_case_far_slower_than_its_provider(
    first: float | Outcome, regressed: str
) -> None:
    both = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[256, 512, 1024, 2048])]
    before = run(both, lambda c: timed(c, 0.01), run_id="before")

    def measure(c: Case) -> list[Measurement]:
        if c is both[0] and isinstance(first, Outcome):
            return ended(c, first)
        return timed(c, first if c is both[0] and isinstance(first, float) else 0.013)

    said = compared(run(both, measure, env=SLOW), before).regressed

    assert regressed in said
    assert bool(said) is bool(regressed)
    assert said.count("nsa,") == bool(regressed), "the others are excused"


def searched(old: Git | None, new: Git | None) -> str:
    """What a page asks for if a step takes twice as long since."""
    cases, envs = sweep(seq_len=[512]), [environment(git=g) for g in (old, new)]
    before = run(cases, lambda c: timed(c, 0.01, cv=0.001), env=envs[0], run_id="before")
    now = run(cases, lambda c: timed(c, 0.02, cv=0.001), env=envs[1], run_id="now")
    assert "Regressed since" in compared(now, before).regressed
    return str(built(now, before)["next_steps"])


GIT = Git(commit="1" * 40, branch="main")


@pytest.mark.parametrize(
    ("old", "ends"),
    [("1", "--runs before now"), ("2", "suites/retest.yaml --good 2222222222 --bad 1111111111")],
)
def test_a_slowdown_has_the_bisection_that_its_two_runs_allow(old: str, ends: str) -> None:
    said = searched(replace(GIT, commit=old * 40), GIT)

    assert f"`harness bisect {ends} --case train/nsa/seq_len=512`" in said


@pytest.mark.parametrize("git", [None, replace(GIT, commit="2" * 40, dirty_sha256="3" * 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_code_that_is_not_that_of_a_commit_has_no_bisection(git: Git | None, turned: bool) -> None:
    assert "bisect" not in searched(*(GIT, git)[:: -1 if turned else 1])
