"""Suites, names and values from strangers: no code runs, no file is written elsewhere."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import Case, Measurement, Outcome
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.store.writer import create
from harness.tests import fake_runs
from harness.tests.workers import make_case, run

ROOT = Path(__file__).resolve().parents[3]
EVALUATORS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
UNSAFE_MODULES = {"pickle", "shelve", "marshal", "dill", "joblib"}
NAMES = [
    "../../../../tmp/evil",
    "/etc/passwd",
    "..",
    ".",
    "a\x00b",
    "a\nb\r\x1b[2J",
    "-rf",
    "$(touch evil); `touch evil`",
    "x" * 5000,
    "µ/日本/\udc80",
    "",
]


def sources() -> Iterator[Path]:
    for folder in (ROOT / "harness", ROOT / "ci"):
        yield from (p for p in sorted(folder.rglob("*.py")) if "tests" not in p.parts)


def dangers(path: Path) -> Iterator[str]:
    """Calls that hand text to a shell, to Python, or to a loader that runs what it loads."""
    tree = ast.parse(path.read_text(), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            shells = [
                k for k in node.keywords if k.arg == "shell" and ast.unparse(k.value) != "False"
            ]
            if called in EVALUATORS | SHELLS or shells:
                yield f"{path.name}:{node.lineno}: {called}"
            if called == "YAML" and {k.arg: ast.unparse(k.value) for k in node.keywords} != {
                "typ": "'safe'",
                "pure": "True",
            }:
                yield f"{path.name}:{node.lineno}: {called} that may construct objects"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
            if {n.partition(".")[0] for n in names} & UNSAFE_MODULES:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_code_gives_text_to_a_shell_or_evaluates_it() -> None:
    found = [danger for path in sources() for danger in dangers(path)]

    assert found == []


def test_the_search_finds_dangerous_calls(tmp_path: Path) -> None:
    lines = [
        "subprocess.run(x, shell=True)",
        "subprocess.Popen(x, shell=flag)",
        "os.system(x)",
        "eval(x)",
        "import pickle",
        "from pickle import loads",
        "YAML()",
        "YAML(typ='unsafe', pure=True)",
    ]
    path = tmp_path / "module.py"
    path.write_text("\n".join(lines))

    assert len(list(dangers(path))) == len(lines)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_suite_or_a_case_leaves_the_folder_of_its_run(
    tmp_path: Path, name: str
) -> None:
    case = fake_runs.case({"seq_len": 1}, case_id=name)
    measured = Measurement(case_id=name, process=0, outcome=Outcome.OK, samples_s=(0.1,))
    run = fake_runs.run([case], lambda c: [measured])
    root = tmp_path / "store"

    with create(root, replace(run.suite, name=name[:200] or "x"), run.environment) as writer:
        log = writer.log_path(name, 0)
        writer.append(measured)
        writer.finish()

    assert log.parent == writer.folder / "logs"
    assert writer.folder.parent == root
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert [p.name for p in root.iterdir()] == [writer.run_id]
    (read,) = reader.load(root, writer.run_id).suite.cases
    assert read.case_id == name.replace("\udc80", "?")


def test_the_value_of_a_variable_is_not_run_by_a_shell(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = "$(touch evil)`touch evil`; touch evil\na'b\"c\n$HOME"
    case: Case = make_case("reads_environment", env={"NSA_TEST_FLAG": value}, axes={})

    (measured,) = run(warm, tmp_path, case)

    assert measured.outcome is Outcome.OK, measured.detail
    assert measured.effective["flag"] == value
    assert "evil" not in {p.name for p in tmp_path.rglob("*")}
