"""The studies of bisections, small: a planted commit, and searches of simulated histories."""

from pathlib import Path

import numpy as np
import pytest

from harness.bisect.search import NoisySearch
from harness.bisect.tests.planted import Planted, make
from harness.tests.gate_repositories import git
from reports.studies import planted_branch
from reports.studies.bisect_errors import bisect
from reports.studies.noise import TYPICAL
from reports.studies.planted_branch import Plant

PLANT = Plant(file="toy/kernel.py", after=r"time\.sleep", insert="x.sum().item()")


def test_a_planted_commit_is_in_its_place_and_all_later_ones_carry_its_line(tmp_path: Path) -> None:
    source = tmp_path / "source"
    line = make(source, Planted(commits=12, merges=(4,), caseless=()))
    clone = tmp_path / "clone"

    good, planted = planted_branch.make(source, clone, PLANT, commits=8, at=5)

    there = git(clone, "rev-list", "--first-parent", "--reverse", f"{good}..planted").split()
    assert good == line[4]
    assert there[:4] == list(line[5:9])
    assert there[4] == planted
    assert len(there) == 9
    assert git(clone, "diff", "--stat", line[8], planted).endswith("1 insertion(+)")
    for old, new in zip(line[9:], there[5:], strict=True):
        changed = git(clone, "diff", "--name-only", old, new)
        assert changed == "toy/kernel.py"
        assert git(clone, "log", "-1", "--format=%s %an %ad", new) == git(
            clone, "log", "-1", "--format=%s %an %ad", old
        )
    text = git(clone, "show", f"{planted}:toy/kernel.py")
    assert "    time.sleep(STEP_S)\n    x.sum().item()\n    return" in text
    assert git(source, "branch", "--all") == "* main"


@pytest.mark.parametrize("after", ["no such line", "import|SYNCS"])
def test_a_line_that_fits_several_places_or_none_is_refused(after: str) -> None:
    with pytest.raises(ValueError, match=r"lines of toy/kernel\.py, not one"):
        Plant(file="toy/kernel.py", after=after, insert="x").into("import time\nSYNCS = 1\n")


def test_simulated_histories_on_a_typical_node() -> None:
    rng = np.random.default_rng(1)

    bisections = [
        bisect(NoisySearch(64, 0.03), int(rng.integers(1, 65)), 1.05, TYPICAL, rng)
        for _ in range(8)
    ]

    assert all(t.right for t in bisections)
    assert all(t.processes < 150 for t in bisections)
