"""Good suite files, where they are found, and the shipped ones."""

from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from ruamel.yaml import YAML

from harness.errors import SuiteError
from harness.records import Case, Gap, Match, MeasureSettings, Outcome, Weight
from harness.suite import load as suites
from harness.suite.schema import json_schema
from harness.tests.good_suite import GOOD

SHIPPED = tuple(path.stem for path in suites.available())


# --- a good suite ------------------------------------------------------------------------


def test_a_case_has_axes_environment_settings_and_allowances() -> None:
    case = suites.loads(GOOD, "x.yaml").cases[1]

    assert case == Case(
        case_id="train/nsa/seq_len=128/gc=off/NSA_USE_FA2=1",
        workload="train",
        factory="suites.workloads:train",
        provider="nsa",
        axes={"preset": "small", "seq_len": 128, "gc": "off", "NSA_USE_FA2": 1},
        swept=("seq_len", "gc", "NSA_USE_FA2"),
        env={"OMP_NUM_THREADS": "1", "NSA_USE_FA2": "1"},
        settings=MeasureSettings(processes=4, timeout_s=60),
        allow={Outcome.TIMEOUT: "slow card"},
        nondeterministic="",
    )


def test_rules_expectations_and_cost_are_complete() -> None:
    loaded = suites.loads(GOOD, "folder/x.yaml")

    assert (loaded.name, loaded.path, loaded.text) == ("x", "folder/x.yaml", GOOD)
    assert loaded.subject == "A100 Retest"
    (expectation,) = loaded.expectations
    assert (expectation.metric, expectation.low, expectation.high) == ("tokens_per_s", 500, 1500)
    assert (expectation.gpu, expectation.source) == ("A100", "runbook")
    assert expectation.match.criteria == {"seq_len": (128,), "gc": ("off",)}
    throughput, scaling = loaded.rules
    assert (throughput.go, throughput.abort, throughput.quantifier) == (500, 100, "all")
    assert (scaling.metric, scaling.axis) == ("scaling_exponent", "seq_len")
    assert loaded.cost is not None
    assert (loaded.cost.steps, loaded.cost.usd_per_gpu_hour) == (50000, 2.0)


def test_a_ratio_rule_and_suspects_are_complete() -> None:
    ratio = (
        "against: {provider: dense}\n    at_least: 1.2\n    counts: condition\n    missing: note"
    )
    text = GOOD.replace("go: 500\n    abort: 100", ratio) + (
        "suspects:\n"
        "  gap: {metric: step_s, expected: 1.0, seen: 2.0, source: s}\n"
        "  tested:\n"
        "    - {name: a, within: {gc: off}, without: {provider: dense}, with: {provider: nsa}}\n"
        "    - {name: b, control: {provider: [dense]}}\n"
    )

    loaded = suites.loads(text, "x.yaml")

    rule = loaded.rules[0]
    assert (rule.go, rule.counts, rule.missing) == (1.2, Weight.CONDITION, Weight.NOTE)
    assert rule.against == Match(criteria={"provider": ("dense",)})
    assert rule.asked == len(rule.pairs(loaded.cases)) > 0
    assert loaded.suspects is not None
    assert loaded.suspects.gap == Gap(metric="step_s", expected=1.0, seen=2.0, source="s")
    pair, control = loaded.suspects.tested
    assert pair.without.criteria == {"gc": ("off",), "provider": ("dense",)}
    assert pair.with_.criteria == {"gc": ("off",), "provider": ("nsa",)}
    assert control.control == Match(criteria={"provider": ("dense",)})


def test_settings_and_allowances_can_be_for_some_cases() -> None:
    text = GOOD.replace(
        "measure: {timeout_s: 60}",
        "measure: [{match: {seq_len: 512}, timeout_s: 120}, {match: {gc: 'on'}, processes: 2}]",
    ).replace(
        "allow: {timeout: slow card}",
        "allow: [{match: {seq_len: 512}, outcome: timeout, reason: long}]",
    )

    cases = suites.loads(text, "x.yaml").cases

    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] == 512} == {120}
    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] != 512} == {90}
    assert {c.settings.processes for c in cases if c.axes["gc"] == "on"} == {2}
    assert {c.axes["seq_len"] for c in cases if Outcome.TIMEOUT in c.allow} == {512}


def test_variables_can_be_set_for_some_cases() -> None:
    listed = "[{match: {provider: nsa}, set: {A: 1, B: x}}, {match: {seq_len: 512}, set: {A: 2}}]"
    cases = suites.loads(GOOD.replace("{OMP_NUM_THREADS: 1}", listed), "x.yaml").cases

    env = {(c.provider, c.axes["seq_len"]): c.env for c in cases if not c.axes["NSA_USE_FA2"]}

    assert env["nsa", 128] == {"A": "1", "B": "x", "NSA_USE_FA2": "0"}
    assert env["nsa", 512] == {"A": "2", "B": "x", "NSA_USE_FA2": "0"}  # the last one counts
    assert env["dense", 512] == {"A": "2", "NSA_USE_FA2": "0"}
    assert env["dense", 128] == {"NSA_USE_FA2": "0"}


def test_requirements_are_a_mapping_or_a_list_of_which_some_only_note() -> None:
    one = suites.loads(GOOD + 'requires: {gpu: H200, driver: "580.*"}\n', "x.yaml")
    several = suites.loads(
        GOOD
        + "requires:\n"
        + '  - {gpus: 2, packages: {flash-attn: ">=2"}, torch: {num_threads: 1}}\n'
        + "  - {gpu: [A100, H100], gpus: 8, variables: {HF_HOME: '*'}, else: note}\n",
        "x.yaml",
    )

    assert (one.requires, one.wants) == ({"gpu": "H200", "driver": "580.*"}, {})
    hard = {"gpus": 2, "packages.flash-attn": ">=2", "torch.num_threads": 1}
    assert several.requires == hard
    assert several.wants == {"gpu": "A100|H100", "gpus": 8, "variables.HF_HOME": "*"}


# --- kernels and operators that must run -------------------------------------------------

MUST = """\
    kernels:
      - {match: {provider: nsa}, must: [_forward_kernel]}
      - {match: {provider: nsa, gc: "on"}, must: [_backward_kernel], must_not: ["*flash*"]}
    operators: {must_not: ["aten::item"]}
"""


def test_each_case_has_the_rules_that_match_it() -> None:
    loaded = suites.loads(GOOD.replace("    env:", MUST + "    env:"), "x.yaml")

    stated = {
        (c.provider, c.axes["gc"]): (c.kernels.must, c.kernels.must_not) for c in loaded.cases
    }
    assert stated["nsa", "off"] == (("_forward_kernel",), ())
    assert stated["nsa", "on"] == (("_forward_kernel", "_backward_kernel"), ("*flash*",))
    assert stated["dense", "off"] == ((), ())
    assert {c.operators.must_not for c in loaded.cases} == {("aten::item",)}


# --- finding a suite ---------------------------------------------------------------------


def test_shipped_suites_are_found_by_name_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for ref in ("smoke", "smoke.yaml", "suites/smoke.yaml", Path("smoke")):
        assert suites.load(ref).path == "suites/smoke.yaml"


@pytest.mark.parametrize(
    ("file", "ref"), [("smoke.yaml", "smoke.yaml"), ("suites/smoke.yaml", "smoke")]
)
def test_a_local_file_wins_over_a_shipped_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, ref: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suites").mkdir()
    (tmp_path / file).write_text(GOOD)

    own = suites.load(ref)

    assert (own.title, own.path, suites.shipped_roots(own)) == ("Retest", file, ())


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


# --- the schema and the suites that ship -------------------------------------------------


def test_the_schema_accepts_a_good_suite_and_rejects_a_bad_one() -> None:
    schema = json_schema()
    yaml = YAML(typ="safe", pure=True)

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.load(GOOD), schema)
    for old, new in [
        ("providers", "provider"),
        ("processes: 4", "processes: 0"),
        ("go: 500", "go: x"),
    ]:
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
    jsonschema.validate(YAML(typ="safe", pure=True).load(loaded.text), json_schema())
