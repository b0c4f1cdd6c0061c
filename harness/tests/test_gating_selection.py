"""A change selects the cases it can reach; where nobody knows, it selects them all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.gating.policy import Choice, Policy, Reach
from harness.gating.records import Stage
from harness.gating.selection import Candidate, select
from harness.records import Case
from harness.tests.gate_repositories import write

POLICY = Policy(
    path="ci/gate.yaml",
    stage=Stage.BLOCK,
    choices=(Choice(suite="suites/train.yaml"), Choice(suite="suites/decode.yaml")),
)
FILES = {
    "nsa/__init__.py": "",
    "nsa/ops.py": "from nsa import reference\nfrom .kernels import banded\n",
    "nsa/reference.py": "",
    "nsa/decode.py": "def go():\n    from nsa.kernels.decode import kernel\n",
    "nsa/unused.py": "import nsa.ops\n",
    "nsa/lazy.py": "import importlib\ndef load(name):\n    return importlib.import_module(name)\n",
    "nsa/table.json": "{}",
    "nsa/kernels/__init__.py": "",
    "nsa/kernels/banded.py": "import torch\n",
    "nsa/kernels/decode.py": "",
    "suites/__init__.py": "",
    "suites/training.py": "from nsa import ops\n",
    "suites/decoding.py": "import nsa.decode as d\n",
    "nsa/tests/test_ops.py": "import nsa.ops\n",
    "ci/check.sh": "",
    "harness/execution/worker.py": "",
    "harness/tests/test_x.py": "",
    "harness/README.md": "",
}


def candidate(name: str, module: str) -> Candidate:
    case = Case(
        case_id=f"{name}/nsa",
        workload=name,
        factory=f"suites.{module}:{name}",
        provider="nsa",
        axes={},
    )
    return Candidate(f"suites/{name}.yaml", case)


CANDIDATES = (candidate("train", "training"), candidate("decode", "decoding"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, FILES)
    return tmp_path


def selected(tree: Path, changed: Sequence[str], policy: Policy = POLICY) -> list[str]:
    why = select(CANDIDATES, changed, [tree], policy).why
    return [suite.removeprefix("suites/").removesuffix(".yaml") for suite, _ in why]


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("nsa/kernels/banded.py", ["train"]),  # a relative import, over a package
        ("nsa/kernels/decode.py", ["decode"]),  # an import inside a function
        ("nsa/__init__.py", ["train", "decode"]),  # runs before every module of the package
        ("nsa/kernels/__init__.py", ["train", "decode"]),
        ("suites/decoding.py", ["decode"]),
        ("suites/train.yaml", ["train"]),
        ("nsa/unused.py", []),  # imports what is measured, and is not imported
        ("nsa/tests/test_ops.py", []),
        ("README.md", []),
        ("nsa/README.md", []),
        ("reports/runs/x/run.jsonl", []),
        ("harness/execution/worker.py", ["train", "decode"]),
        ("harness/tests/test_x.py", []),
        ("harness/README.md", []),
        ("ci/gate.yaml", ["train", "decode"]),
        ("ci/check.sh", ["train", "decode"]),  # in doubt
        ("constraints.txt", ["train", "decode"]),
        ("pyproject.toml", ["train", "decode"]),
        ("nsa/table.json", ["train", "decode"]),  # who reads it, no import tells
        ("nsa/kernels/fast.cu", ["train", "decode"]),
    ],
)
def test_a_changed_file_selects_what_it_reaches(
    changed: str, reached: list[str], tree: Path
) -> None:
    assert selected(tree, [changed]) == reached


def test_no_change_selects_nothing(tree: Path) -> None:
    assert selected(tree, []) == []


def test_a_deleted_module_is_looked_for_in_the_base(tree: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    write(head, {n: t for n, t in FILES.items() if n != "nsa/kernels/banded.py"})
    write(head, {"nsa/ops.py": ""})

    why = select(CANDIDATES, ["nsa/kernels/banded.py"], [tree, head], POLICY).why

    assert [case_id for _, case_id in why] == ["train/nsa"]


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("name", ["train"]),  # any at all
        ("'nsa.' + name", ["train"]),
        ("f'nsa.{name}'", ["train"]),
        ("'nsa.unused'", ["train"]),
        ("'other.' + name", []),
        ("f'nsa.kernels.{name}'", []),
    ],
)
def test_an_import_by_a_computed_name_may_be_any_module_that_begins_so(
    name: str, reached: list[str], tree: Path
) -> None:
    lazy = f"import importlib\ndef load(name):\n    return importlib.import_module({name})\n"
    write(tree, {"nsa/reference.py": lazy})

    assert selected(tree, ["nsa/unused.py"]) == reached


def test_a_module_that_does_not_parse_may_import_anything(tree: Path) -> None:
    write(tree, {"nsa/reference.py": "def (\n"})

    assert selected(tree, ["nsa/unused.py"]) == ["train"]


def test_the_policys_map_adds_cases_or_says_which_alone(tree: Path) -> None:
    more = replace(POLICY, reaches=(Reach(paths=("nsa/kern*",), cases=("decode",), only=False),))
    only = replace(POLICY, reaches=(Reach(paths=("ci/*",), cases=(), only=True),))

    assert selected(tree, ["nsa/kernels/banded.py"], more) == ["train", "decode"]
    assert selected(tree, ["ci/check.sh"], only) == []
    assert selected(tree, ["ci/check.sh", "nsa/decode.py"], only) == ["decode"]
