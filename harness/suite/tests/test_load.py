"""Good suite files, where they are found, and the shipped ones."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from ruamel.yaml import YAML

from harness.errors import SuiteError
from harness.suite import load as suites
from harness.suite.fields import schema_of
from harness.suite.schema import SuiteModel
from harness.tests.good_suite import GOOD

EXPANDED = Path(__file__).with_name("expanded.txt")
SHIPPED = tuple(path.stem for path in suites.available())


def shown(value: Any) -> Any:
    """A record without the fields that have their defaults."""
    if isinstance(value, Mapping):
        return {str(key): shown(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [shown(one) for one in value]
    if not is_dataclass(value):
        return value
    given = ((f, getattr(value, f.name)) for f in fields(value))
    return {f.name: shown(v) for f, v in given if v not in (f.default, None, (), {}, "")}


def test_every_key_of_the_page_of_suites_reaches_the_records() -> None:
    """The suite and the program of suites/README.md, as expanded.txt. To accept it: ACCEPT=1."""
    page = Path(suites.__file__).resolve().parents[2] / "suites/README.md"
    whole, program = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    text = whole.replace("\nexpectations:", f"\n{program}\nexpectations:", 1)

    loaded = shown(replace(suites.loads(text, "folder/norm.yaml"), text="", sha256=""))

    cases = {case.pop("case_id"): case for case in loaded.pop("cases")}
    lines = [f"{name}: {json.dumps(value)}" for name, value in (loaded | cases).items()]
    expanded = "\n".join(lines) + "\n"
    if os.environ.get("ACCEPT"):
        EXPANDED.write_text(expanded)
    assert expanded == EXPANDED.read_text()


def test_shipped_suites_are_found_by_name_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for ref in ("smoke", "smoke.yaml", "suites/smoke.yaml", Path("smoke")):
        assert suites.load(ref).path == "suites/smoke.yaml"


def test_a_local_file_wins_over_a_shipped_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suites").mkdir()
    for file, ref in (("smoke.yaml", "smoke.yaml"), ("suites/smoke.yaml", "smoke")):
        (tmp_path / file).write_text(GOOD)
        own = suites.load(ref)
        assert (own.title, own.path, suites.shipped_roots(own)) == ("Retest", file, ())
        (tmp_path / file).unlink()


def test_a_missing_file_lists_the_shipped_suites(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no such suite") as caught:
        suites.load(tmp_path / "smok.yaml")

    assert "Did you mean 'smoke'" in str(caught.value)
    assert all(name in str(caught.value) for name in SHIPPED)


def test_a_binary_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\x89PNG\xff\x00")

    for path, why in ((binary, "not a text file"), (tmp_path, "directory")):
        with pytest.raises(SuiteError, match=why):
            suites.load(path)


def test_the_schema_accepts_a_good_suite_and_rejects_a_bad_one() -> None:
    schema, yaml = schema_of(SuiteModel), YAML(typ="safe", pure=True)

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.load(GOOD), schema)
    bad = [("providers", "provider"), ("processes: 4", "processes: 0"), ("go: 500", "go: x")]
    for old, new in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.load(GOOD.replace(old, new)), schema)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_suite_starts_with_schema_and_question(name: str) -> None:
    loaded = suites.load(name)

    lines = loaded.text.splitlines()
    assert lines[0] == "# yaml-language-server: $schema=suite.schema.json"
    assert lines[2].endswith("?")
    assert loaded.question.endswith("?")
    assert loaded.rules
    jsonschema.validate(YAML(typ="safe", pure=True).load(loaded.text), schema_of(SuiteModel))
