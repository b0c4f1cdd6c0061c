"""The sample of mutants: which there are, which are drawn, and whether one is noticed."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from reports.studies import mutation_sample
from reports.studies.mutation_sample import ROOT, Sample, drawn, mutants, noticed, passes, report

SOURCE = '''
"""A docstring: 1 < 2."""
LIMIT: int = 3
CALM = 0.5

def known(a: int, b: int, names: list[int]) -> bool:
    if a < b and not names:
        raise ValueError(f"{a + 1} is not {max(names)}")
    return a != LIMIT

def best(a: int, b: int) -> int | None:
    """Returns 1 + 1."""
    found = [known(a, b, []), "µ" in "µ" + str(a)]
    found.append(True)
    found[0] = min(found)
    return a - b if any(found) else None
'''
COMMAND = (sys.executable, "-c", "import logic; assert logic.double(2) == 4")


def changes(operator: str) -> list[tuple[str, str]]:
    return [(m.code, m.changed) for m in mutants(SOURCE) if m.operator == operator]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (
            "comparison",
            [
                ("a < b", "a <= b"),
                ("a != LIMIT", "a == LIMIT"),
                ("'µ' in 'µ' + str(a)", "'µ' not in 'µ' + str(a)"),
            ],
        ),
        ("constant", [("3", "4"), ("3", "2"), ("0.5", "0.55"), ("0", "1"), ("0", "-1")]),
        ("sign", [("a - b", "a + b")]),
        ("and, or", [("a < b and (not names)", "a < b or not names")]),
        ("not", [("not names", "names")]),
        ("answer", [("return a != LIMIT", "return not a != LIMIT")]),
        (
            "return",
            [("return a - b if any(found) else None", "return None")],
        ),
        ("statement", [("found.append(True)", "pass"), ("found[0] = min(found)", "pass")]),
        ("turned", [("min(found)", "max(found)"), ("any(found)", "all(found)")]),
        ("arms", [("a - b if any(found) else None", "None if any(found) else a - b")]),
        ("arguments", [("known(a, b, [])", "known(b, a, [])")]),
    ],
)
def test_the_logic_of_a_module_is_changed_and_no_text(
    operator: str, expected: Sequence[tuple[str, str]]
) -> None:
    assert changes(operator) == expected


def test_a_mutant_changes_only_its_own_place() -> None:
    for mutant in mutants(SOURCE):
        old, new = (ast.unparse(ast.parse(s)) for s in (SOURCE, mutant.applied(SOURCE)))
        assert sum(a != b for a, b in zip(old.splitlines(), new.splitlines(), strict=True)) == 1
        assert mutant.line == 1 + SOURCE.encode()[: mutant.start].count(b"\n")


def test_every_mutant_of_a_module_has_its_own_name() -> None:
    keys = [m.key for m in mutants((ROOT / "harness/report/tables.py").read_text())]

    assert len(set(keys)) == len(keys) > 100


def test_a_draw_repeats_and_is_spread_over_the_operators() -> None:
    found = mutants(SOURCE)

    first = drawn(found, 11, "1")

    assert drawn(found, 11, "1") == first != drawn(found, 11, "2")
    assert len({m.operator for m in first}) == 11
    assert sorted(map(id, drawn(found, 99, "1"))) == sorted(map(id, found))


def test_the_modules_and_their_tests_exist() -> None:
    paths = [p for module, tests in mutation_sample.MODULES.items() for p in (module, *tests)]

    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_a_survivor_is_reported_with_its_place_unless_it_is_judged_equivalent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def double(x):\n    return x * 2\n\ndef idle(x):\n    return x * 2\n"
    (tmp_path / "logic.py").write_text(source)
    monkeypatch.setattr(mutation_sample, "MODULES", {"logic.py": ("-c", COMMAND[-1])})
    monkeypatch.setattr(mutation_sample, "PYTEST", (sys.executable,))
    monkeypatch.setattr(mutation_sample, "ROOT", tmp_path)
    chosen = [
        m for m in mutants(source, "logic.py") if m.changed in ("x / 2", "2 + 1", "return None")
    ]
    sample = Sample({"logic.py": chosen}, deadline=float("inf"))

    sample.work(tmp_path)

    assert [m.function for m, seen in sample.outcomes.items() if seen] == ["double", "double"]
    assert "survived: logic.py:5 idle: x * 2 -> x / 2" in report(sample, {})
    judged = {"logic.py": {"idle: x * 2 -> x / 2": "not called", "gone: 1 -> 2": "of old code"}}
    text = report(sample, judged)
    assert "x / 2" not in text
    assert "| all | 2 | 1 | 1 |" in text
    assert "Noticed: 2 of 3" in text
    assert "stale: logic.py: gone: 1 -> 2" in text
    assert (tmp_path / "logic.py").read_text() == source


def test_bytecode_of_the_same_second_and_length_is_not_used(tmp_path: Path) -> None:
    source = "def double(x):\n    return x * 2\n"
    (tmp_path / "logic.py").write_text(source)

    assert passes(tmp_path, COMMAND, 9)[0]
    assert noticed(tmp_path, "logic.py", source.replace("2", "3"), COMMAND, 9)
    assert passes(tmp_path, COMMAND, 9)[0]


def test_tests_that_hang_are_ended(tmp_path: Path) -> None:
    ended_well, _ = passes(tmp_path, (sys.executable, "-c", "import time; time.sleep(99)"), 0.2)

    assert not ended_well


def test_tests_that_do_not_run_the_copy_give_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logic.py").write_text("X = 1\n")
    monkeypatch.setattr(mutation_sample, "MODULES", {"logic.py": ("-c", "pass")})
    monkeypatch.setattr(mutation_sample, "PYTEST", (sys.executable,))
    sample = Sample({"logic.py": mutants("X = 1\n", "logic.py")}, deadline=float("inf"))

    sample.work(tmp_path)

    assert sample.outcomes == {}
    assert len(sample.problems) == 1
    assert not noticed(tmp_path, "logic.py", "", (sys.executable, "-c", ""), 9)
