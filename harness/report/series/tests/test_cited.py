"""What other stored runs add to a page."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import report as command
from harness.records import Case, Environment, Match, Measurement, Outcome, Rule, Run, SeeAlso
from harness.store import reader
from harness.tests.command_line import harness
from harness.tests.fake_runs import ended, environment, run, sweep, timed
from harness.tests.indexed import A100, dated, store

FAST = SeeAlso(
    suite="other",
    better=Match(criteria={"route": ("triton",)}),
    than=Match(criteria={"route": ("gather",)}),
    same=("seq_len",),
    command="python -m train",
)
RULE = Rule(name="fast", metric="tokens_per_s", go=1.0)


def here(root: Path, *seq_len: int, step_s: float = 0.4, rule: Rule = RULE) -> Run:
    """A stored run of the suite that sees another, with one judged case or several."""
    made = run(sweep(seq_len=seq_len or [512]), lambda c: timed(c, step_s), rules=[rule])
    made = replace(made, suite=replace(made.suite, see_also=(FAST,)))
    return reader.load(root, store(root, made))


def stored(root: Path, made: Run, day: str) -> str:
    run_id = store(root, made)
    dated(root, run_id, f"{day}T00:00:00+00:00")
    return run_id


def there(root: Path, day: str, steps: Mapping[str, float], env: Environment | None = None) -> str:
    """A stored run of the other suite: its id."""
    made = run(
        sweep(seq_len=[512], route=[*steps]),
        lambda c: timed(c, steps[str(c.axes["route"])], processes=2),
        env=env,
    )
    return stored(root, replace(made, suite=replace(made.suite, name="other")), day)


def test_the_newest_run_of_another_suite_on_this_gpu_model_supports_a_step(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    newest = there(runs, "2026-12-01", {"triton": 0.02, "gather": 0.4})
    there(runs, "2026-11-01", {"triton": 0.01, "gather": 0.4})
    there(runs, "2026-12-02", {"gather": 0.4})
    there(runs, "2026-12-03", {"triton": 0.03, "gather": 0.4}, environment(gpu=A100))

    text = (page := command.written(here(runs), tmp_path)).read_text(encoding="utf-8")

    (step,) = (one for one in text.splitlines() if "python -m train" in one)
    assert f", run `{newest}`" in step
    assert "tokens/s instead of" in step
    assert "route=gather" in step
    assert f"--cite {newest}  #" in text
    there(runs, "2026-12-04", {"triton": 0.001, "gather": 0.4})
    verified = harness("verify", str(page), "--store", str(runs), cwd=tmp_path)
    assert (verified.returncode, verified.stderr) == (0, ""), "the page keeps the run that it names"


@pytest.mark.parametrize(
    ("seq_len", "go", "said"),
    [
        ((512,), 20_000, "tokens/s in run `{}`): now "),
        ((512, 768), 20_000, "in run `{}`, enough for 1 of 2 slow cases): now "),
        ((512, 256), 20_000, "speed up nsa, seq_len=256 by 31x, and 1 more case: now "),
        ((512,), 25_600, "speed up nsa, seq_len=512 by 20x: now "),
    ],
)
def test_the_first_line_asks_for_no_speed_that_a_step_reaches(
    tmp_path: Path, seq_len: tuple[int, ...], go: float, said: str
) -> None:
    runs = tmp_path / "runs"
    other = there(runs, "2026-11-01", {"triton": 0.02, "gather": 0.4})
    rule = replace(RULE, go=go, abort=1.0)

    page = command.written(here(runs, *seq_len, rule=rule), tmp_path).read_text(encoding="utf-8")

    screen = page.partition("## Verdict")[0]
    assert said.format(other) in next(one for one in screen.splitlines() if "**Act**" in one)
    assert screen.count("`python -m train`") == 1
    assert ("speed up" in screen.lower()) == ("speed up" in said)


def test_a_no_go_keeps_the_step_that_another_run_supports(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    there(runs, "2026-11-01", {"triton": 0.02, "gather": 0.4})
    rule = replace(RULE, go=20_000, abort=15_000)

    page = command.written(here(runs, 512, rule=rule), tmp_path).read_text(encoding="utf-8")

    screen = page.partition("## Verdict")[0]
    assert "do not go ahead" in screen
    assert screen.count("`python -m train`") == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"seq_len": 1024}, {"triton": 0.01, "gather": 0.4}, id="another length"),
        pytest.param({}, {"triton": 0.39, "gather": 0.4}, id="no gain there"),
        pytest.param({"step_s": 0.01}, {"triton": 0.01, "gather": 0.4}, id="no gain here"),
    ],
)
def test_no_step_is_given_that_does_not_fit_or_gains_nothing_here(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, float]
) -> None:
    runs = tmp_path / "runs"
    there(runs, "2026-11-01", theirs)

    longer = [ours.pop("seq_len")] if "seq_len" in ours else []
    page = command.written(here(runs, *longer, **ours), tmp_path)

    assert "python -m train" not in page.read_text(encoding="utf-8")


def with_peers(
    root: Path, day: str, peers: Mapping[str, float], env: Environment | None = None
) -> Run:
    """A stored run of a suite whose peers `fla` and `other` have a time, or are unsupported."""
    cases = [c for name in ("nsa", "fla", "other") for c in sweep(provider=name, seq_len=[512])]

    def measure(c: Case) -> list[Measurement]:
        step_s = peers.get(c.provider, 0.01 if c.provider == "nsa" else None)
        return timed(c, step_s) if step_s else ended(c, Outcome.UNSUPPORTED)

    against = Match(criteria={"provider": ("fla", "other")})
    ours = Match(criteria={"provider": ("nsa",)})
    rule = Rule(name="peers", metric="step_s", go=1.0, match=ours, against=against)
    made = run(cases, measure, rules=[rule], env=env)
    made = replace(made, suite=replace(made.suite, peers=("fla", "other")))
    return reader.load(root, stored(root, made, day))


def test_a_peer_has_the_time_of_an_earlier_run_which_decides_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with_peers(runs, "2026-10-01", {"fla": 0.03, "other": 0.05})
    earlier = with_peers(runs, "2026-11-01", {"fla": 0.02})
    with_peers(runs, "2026-11-02", {"fla": 0.07, "other": 0.07}, environment(gpu=A100))
    now = with_peers(runs, "2026-11-03", {"other": 0.06})
    with_peers(runs, "2026-11-04", {"fla": 0.08})

    text = command.written(now, tmp_path).read_text(encoding="utf-8")

    (said,) = (one for one in text.splitlines() if "Timed before, and not judged" in one)
    assert f"(run `{earlier.run_id}` at commit `406312f800`)" in said
    assert "fla, seq_len=512 20.0 ms" in said
    assert "other," not in said
    assert f"--cite {earlier.run_id}  #" in text, "not the older one too"
    assert "no time of fla (unsupported)" in text, "the verdict does not take it"


def test_without_such_a_run_nothing_is_said(tmp_path: Path) -> None:
    now = with_peers(tmp_path / "runs", "2026-11-03", {"other": 0.06})

    text = command.written(now, tmp_path).read_text(encoding="utf-8")

    assert "Timed before" not in text
