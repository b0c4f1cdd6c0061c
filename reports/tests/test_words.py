"""The tables of words name facts that the code finds."""

import ast
import re
from pathlib import Path

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "harness"
TABLES = sorted((HARNESS / "report/templates").glob("*.toml"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_every_fact_that_a_clause_names_is_found_by_the_code(table: Path) -> None:
    """Otherwise a clause is never printed: its fact is misspelt, there or in the code."""
    modules = [
        p for p in HARNESS.rglob("*.py") if "tests" not in p.parts and "report" not in p.parts
    ]
    nodes = [node for p in modules for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))]
    found = {node.value for node in nodes if isinstance(node, ast.Constant)}
    found |= {node.arg for node in nodes if isinstance(node, ast.keyword)}

    named = set(re.findall(r"\{(\w+)", table.read_text(encoding="utf-8").partition("\n\n")[2]))

    assert named
    assert named - found - {"value"} == set()
