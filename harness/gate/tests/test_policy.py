"""Policies: every key is read, and every error has its place."""

import datetime
import json
from pathlib import Path
from textwrap import dedent

import jsonschema  # type: ignore[import-untyped]
import pytest

from harness.errors import SuiteError
from harness.gate import policy
from harness.gate.records import Stage
from harness.suite.positions import read
from harness.tests.fake_runs import sweep

ROOT = Path(__file__).resolve().parents[3]
CASES = sweep(seq_len=[512, 2048])

WHOLE = """\
schema: 1
stage: block
inconclusive: block
new_cases: block
roots: [src]
suites:
  - {suite: suites/gate.yaml, cases: ["train/*"]}
absolute:
  - {match: {provider: nsa}, gpu: H200, metric: tokens_per_s, low: 500, source: run 12}
  - {metric: peak_memory_bytes, high: 8.0e+9, source: the card}
  - {kernels: {must: ["_selected*"]}, source: the route}
compare: {screen_pairs: 4, confirm_pairs: 30, tolerance: 0.04}
calibration: {required: true, max_age_days: 7}
baseline: {max_age_days: 14}
exemptions:
  - {cases: [seq_len=512], expect: noisy, reason: short, expires: 2026-12-31}
paths: ["nsa/**", "!**/*.md"]
"""


def load(tmp_path: Path, text: str) -> policy.Policy:
    (tmp_path / "gate.yaml").write_text(text)
    return policy.load(tmp_path / "gate.yaml")[0]


def test_every_key_reaches_the_record(tmp_path: Path) -> None:
    found = load(tmp_path, WHOLE)

    assert (found.stage, found.inconclusive_blocks, found.new_cases_block) == (
        Stage.BLOCK,
        True,
        True,
    )
    assert (found.roots, found.choices[0].filters) == (("src",), ("train/*",))
    assert [(r.metric, r.go, r.abort, r.gpu) for r in found.rules] == [
        ("tokens_per_s", 500, None, "H200"),
        ("peak_memory_bytes", 8.0e9, None, "*"),
    ]
    assert found.kernels[0][2].must == ("_selected*",)
    assert (found.thresholds.screen_pairs, found.thresholds.tolerance) == (4, 0.04)
    assert (found.calibration_required, found.calibration_days, found.baseline_days) == (
        True,
        7,
        14,
    )
    assert found.exemptions[0].place.endswith("gate.yaml:16")
    assert found.choices[0].paths == ("nsa/**", "!**/*.md")


@pytest.mark.parametrize(
    ("paths", "changed", "concerned"),
    [
        (None, "any/file", True),
        (["nsa/**"], "nsa/ops.py", True),
        (["nsa/**"], "nsa/kernels/decode.py", True),
        (["nsa/**"], "nsab/ops.py", False),
        (["nsa/*"], "nsa/kernels/decode.py", False),
        (["**/*.py"], "setup.py", True),
        (["**/*.py"], "nsa/kernels/decode.py", True),
        (["**", "!**/*.md"], "nsa/README.md", False),
        (["**", "!**/*.md"], "README.md", False),
        (["!nsa/**", "nsa/**"], "nsa/ops.py", True),  # the last that fits decides
        (["*.py"], "suites/gate.yaml", True),  # its own file
        (["*.py"], "a.pyc", False),
    ],
)
def test_paths_select_the_changed_files_that_trigger_a_suite(
    paths: list[str] | None, changed: str, concerned: bool, tmp_path: Path
) -> None:
    stated = f"paths: {json.dumps(paths)}\n" if paths else ""
    text = "schema: 1\nstage: warn\nsuites: [{suite: suites/gate.yaml}]\n" + stated

    assert load(tmp_path, text).choices[0].concerned_by(changed) is concerned


def test_a_change_of_the_policy_triggers_every_suite(tmp_path: Path) -> None:
    found = load(tmp_path, WHOLE)

    assert found.concerned(found.choices, [found.path]) == ["suites/gate.yaml"]
    assert found.concerned(found.choices, ["README.md"]) == []
    assert found.concerned(found.choices, []) == []


def test_a_suite_may_have_its_own_paths(tmp_path: Path) -> None:
    text = WHOLE.replace('cases: ["train/*"]', 'paths: ["src/**"]')

    assert load(tmp_path, text).choices[0].paths == ("src/**",)


def test_an_exemption_includes_its_last_day(tmp_path: Path) -> None:
    (exemption,) = load(tmp_path, WHOLE).exemptions

    assert not exemption.expired(datetime.date(2026, 12, 31))
    assert exemption.expired(datetime.date(2027, 1, 1))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("stage: block", "stage: blok", "2:8: stage must be 'shadow', 'warn' or 'block'"),
        ("inconclusive", "inconclusiv", "Did you mean 'inconclusive'"),
        ("suites/gate.yaml", "../gate.yaml", "must be in the repository"),
        ("suites/gate.yaml", "/etc/gate.yaml", "must be in the repository"),
        ("2026-12-31", "31.12.2026", "must be a date"),
        ("low: 500", "high: 500", "needs low only"),
        ("metric: tokens_per_s", "metric: token_per_s", "Did you mean 'tokens_per_s'"),
        ("confirm_pairs: 30", "confirm_pairs: 3", "confirm_pairs=3"),
        ('must: ["_selected*"]', "", "needs must, must_not or both"),
        ("nsa/**", "!nsa/**", "only excludes files"),
        ("nsa/**", "nsa/[ab]", "'nsa/[ab]' contains '['"),
        ("paths:", "reaches:", "use `paths`"),
        ("paths:", "select:", "use `paths`"),
        ("\nabsolute:", "\n  - {suite: suites/gate.yaml}\nabsolute:", "names a suite twice"),
        (", reason: short", "", "reason is missing"),
        ("schema: 1", "schema: !!python/name:os.system 1", "tag"),
    ],
)
def test_an_error_has_its_place_and_a_remedy(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    assert before in WHOLE

    with pytest.raises(SuiteError, match=r"gate\.yaml:") as refused:
        load(tmp_path, WHOLE.replace(before, after, 1))

    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("provider: nsa", "provider: nsb", "9:24: provider is never 'nsb'"),
        ("seq_len=512]", "seq_len=513]", "no case of the gate matches 'seq_len=513'"),
        ("nsa/**", "nsb/**", "no file of the candidate matches 'nsb/**'"),
    ],
)
def test_a_pattern_without_a_match_is_refused(before: str, after: str, message: str) -> None:
    assert before in WHOLE
    document = read(WHOLE.replace(before, after, 1), "gate.yaml")

    with pytest.raises(SuiteError) as refused:
        policy.check(document, CASES, [], ["nsa/ops.py"])

    assert message in str(refused.value)


def test_a_case_of_several_suites_is_suggested_once() -> None:
    document = read(WHOLE.replace("seq_len=512]", "seq_len=513]", 1), "gate.yaml")

    with pytest.raises(SuiteError) as refused:
        policy.check(document, [*CASES, *CASES], [])

    assert str(refused.value).count("'train/nsa/seq_len=2048'") == 1


def test_an_exemption_may_name_a_case_of_the_baseline_only() -> None:
    text = WHOLE.replace("seq_len=512]", "seq_len=513]", 1)

    policy.check(read(text, "gate.yaml"), CASES, ["train/nsa/seq_len=513"])


def test_an_absent_policy_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="cannot read the policy"):
        policy.load(tmp_path / "gate.yaml")


def test_the_error_for_an_empty_policy_has_a_valid_example(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"gate\.yaml: the file is empty") as refused:
        load(tmp_path, "# nothing yet\n")

    _, _, remedy = str(refused.value).partition("needs at least:\n")
    (choice,) = load(tmp_path, dedent(remedy)).choices
    assert choice.suite == "suites/gate.yaml"


def test_the_shipped_schema_is_current() -> None:
    shipped = json.loads((ROOT / "ci/gate.schema.json").read_text())

    assert shipped == policy.json_schema()


def test_the_shipped_policy_is_valid() -> None:
    path = ROOT / "ci/gate.yaml"
    loaded, document = policy.load(path)

    jsonschema.validate(document.data, policy.json_schema())
    assert loaded.choices


def test_the_schema_refuses_an_invalid_policy() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            read(dedent("schema: 1\nstage: blok\nsuites: [{suite: a}]\n"), "x").data,
            policy.json_schema(),
        )
