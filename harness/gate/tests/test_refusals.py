"""A policy with wrong suites or cases is refused before anything runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import main as cli
from harness.errors import SuiteError
from harness.tests.gate_repositories import POLICY, SUITE, repository

TWO = POLICY.replace("suites: [", "suites:\n  - {suite: toysuites/more.yaml}\n  - ").replace(
    "}]", "}"
)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(
            "suites/toys.yaml",
            "suites/toy.yaml",
            "ci/gate.yaml:5:13: the candidate has no suite toysuites/toy.yaml\n"
            "  Check the spelling, or add the file. Did you mean 'toysuites/toys.yaml'? "
            "Valid: 'toysuites/more.yaml', 'toysuites/toys.yaml'.",
            id="suite",
        ),
        pytest.param(
            "suites/toys.yaml",
            "suite/toys.yaml",
            "ci/gate.yaml:5:13: the candidate has no suite toysuite/toys.yaml\n"
            "  Check the spelling, or add the file.",
            id="folder",
        ),
        pytest.param(
            "toys.yaml",
            "toys.yaml, cases: ['!x', zzz]",
            "ci/gate.yaml:5:48: no case of toysuites/toys.yaml matches '!x', 'zzz'\n"
            "  Valid: 'sleep/a/step_s=0.004'.",
            id="cases",
        ),
        pytest.param(
            "toys.yaml",
            "toys.yaml, cases: ['!sleep/*']",
            "ci/gate.yaml:5:42: no case of toysuites/toys.yaml matches '!sleep/*'\n",
            id="all left out",
        ),
    ],
)
def test_a_wrong_name_is_refused_with_suggestions(
    before: str, after: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert before in TWO
    text = TWO.replace(before, after, 1)
    files = {"ci/gate.yaml": text, "toysuites/more.yaml": SUITE}
    monkeypatch.chdir(repository(tmp_path / "toys", files))

    with pytest.raises(SuiteError) as refused:
        CliRunner().invoke(cli.app, ["gate"], catch_exceptions=False)

    assert said in str(refused.value)


def test_a_suite_without_its_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (Path(__file__).resolve().parents[3] / "suites/counters.yaml").read_text()
    text = POLICY + "counters: [{suite: suites/counters.yaml}]\n"
    files = {"ci/gate.yaml": text, "suites/counters.yaml": shipped}
    monkeypatch.chdir(repository(tmp_path / "toys", files))

    with pytest.raises(SuiteError) as refused:
        CliRunner().invoke(cli.app, ["gate", "--counters"], catch_exceptions=False)

    place, said = str(refused.value).split(": ", 1)
    line = shipped.splitlines()[int(place.split(":")[1]) - 1]
    assert line.strip() == "factory: suites.workloads:train"
    assert "the repository has no package 'suites'" in said
