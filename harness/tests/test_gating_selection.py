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
    "ci/tool.py": "",
    "src/kern/__init__.py": "",
    "src/kern/ops.py": "",
    "setup.py": "",
    "nsa/torch.py": "",
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
        ("ci/tool.py", ["train", "decode"]),  # of no package: its name is not known
        ("src/kern/ops.py", ["train", "decode"]),  # of one that lies under no root
        ("setup.py", []),
        ("nsa/torch.py", ["train"]),  # may be the one that is imported and lies under no root
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


LOADS = [
    "import sys\nsys.path.insert(0, 'src')\nfrom kern.ops import go\n",
    "from sys import path\n",
    "import sys as system\n",
    "import importlib.util as u\nu.spec_from_file_location('k', 'k')\n",
    "from importlib.util import spec_from_file_location as spec\n",
    "import importlib.machinery\n",
    "from importlib import machinery\n",
    "import runpy\n",
    "from pkgutil import walk_packages\n",
    "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'kern'])\n",
    "exec(open(name).read())\n",
    "from pathlib import Path\ntext = (Path(__file__).parent / 'kern.py').read_text()\n",
    "from importlib import import_module as load\nload(name)\n",
    "import importlib\nfound = map(importlib.import_module, names)\n",
    "__path__.append('src')\n",
]


@pytest.mark.parametrize("text", LOADS)
def test_a_case_that_loads_code_in_another_way_is_reached_by_all_code(
    text: str, tree: Path
) -> None:
    """Even by a module that another case imports under its name."""
    write(tree, {"nsa/reference.py": text})

    for path in ("nsa/unused.py", "nsa/kernels/decode.py", "nsa/tests/inputs.py"):
        assert "train" in selected(tree, [path]), path
    assert selected(tree, ["nsa/unused.py"]) == ["train"]
    assert selected(tree, ["nsa/tests/test_ops.py", "nsa/tests/conftest.py", "a.md"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import sys, re\nsys.stdout.flush()\nre.compile('a')\nmodel.eval()\n",
        "from importlib.util import find_spec\nfind_spec('kern')\n",
        "import importlib\nimportlib.import_module('nsa.kernels.banded')\n",
        "names = root.rglob('*.py')\n",
        "'''As in\nkern.py'''\n",
    ],
)
def test_what_loads_no_code_leaves_the_choice_to_imports(text: str, tree: Path) -> None:
    write(tree, {"nsa/reference.py": text})

    assert selected(tree, ["nsa/unused.py"]) == []


def test_how_the_harness_loads_code_is_no_matter_of_a_case(tree: Path) -> None:
    write(tree, {"nsa/reference.py": "import harness.workload\n", "harness/workload.py": LOADS[0]})

    assert selected(tree, ["nsa/unused.py"]) == []


def test_a_name_relative_to_a_computed_package_may_be_any_module(tree: Path) -> None:
    write(tree, {"nsa/reference.py": "import importlib\nimportlib.import_module('.a', name)\n"})

    assert selected(tree, ["nsa/unused.py"]) == ["train"]


@pytest.mark.parametrize(
    ("name", "roots", "reached"),
    [
        ("kern.ops", (".",), ["train", "decode"]),  # as an editable install has it
        ("kern.ops", (".", "src"), ["train"]),
        ("src.kern.ops", (".",), ["train"]),
    ],
)
def test_a_package_that_lies_under_no_root_is_not_known(
    name: str, roots: tuple[str, ...], reached: list[str], tree: Path
) -> None:
    write(tree, {"nsa/reference.py": f"from {name} import go\n"})

    assert selected(tree, ["src/kern/ops.py"], replace(POLICY, roots=roots)) == reached


def test_a_name_that_lies_under_no_root_may_be_a_package_known_by_another(tree: Path) -> None:
    write(tree, {"src/__init__.py": "", "nsa/reference.py": "import kern.ops\n"})

    assert selected(tree, ["src/kern/ops.py"]) == ["train"]


@pytest.mark.parametrize("package", [True, False])
def test_a_link_is_followed_to_what_changed(package: bool, tree: Path) -> None:
    write(tree, {"nsa/reference.py": "from suites.linked import kern\n", "shared/kern.py": ""})
    write(tree, {"shared/__init__.py": ""} if package else {})
    (tree / "suites/linked").mkdir()
    (tree / "suites/linked/kern.py").symlink_to("../../shared/again.py")
    (tree / "shared/again.py").symlink_to("kern.py")
    (tree / "nsa/folder").symlink_to("../shared")

    for path in ("suites/linked/kern.py", "shared/again.py", "shared/kern.py"):
        assert selected(tree, [path]) == ["train"], path

    write(tree, {"nsa/reference.py": "from nsa.folder import kern\n"})
    assert selected(tree, ["shared/kern.py"]) == ["train"]


def test_a_module_is_known_only_where_both_sides_know_it(tree: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    write(head, {**FILES, "ci/__init__.py": ""})

    why = select(CANDIDATES, ["ci/tool.py"], [tree, head], POLICY).why
    alone = select(CANDIDATES, ["ci/tool.py"], [head], POLICY).why

    assert (len(why), len(alone)) == (2, 0)


def test_the_policys_map_adds_cases_or_says_which_alone(tree: Path) -> None:
    more = replace(POLICY, reaches=(Reach(paths=("nsa/kern*",), cases=("decode",), only=False),))
    only = replace(POLICY, reaches=(Reach(paths=("ci/*",), cases=(), only=True),))

    assert selected(tree, ["nsa/kernels/banded.py"], more) == ["train", "decode"]
    assert selected(tree, ["ci/check.sh"], only) == []
    assert selected(tree, ["ci/check.sh", "nsa/decode.py"], only) == ["decode"]
