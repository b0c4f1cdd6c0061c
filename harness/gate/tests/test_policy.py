"""Policies: every key is read, and every error has its place."""

from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from harness.errors import SuiteError
from harness.gate import policy
from harness.suite.fields import schema_of
from harness.suite.positions import read

ROOT = Path(__file__).resolve().parents[3]

WHOLE = """\
schema: 1
stage: block
suites:
  - {suite: suites/gate.yaml, cases: ["train/*"]}
compare: {screen_pairs: 4, confirm_pairs: 30, tolerance: 0.04}
exempt:
  - {cases: [seq_len=512], because: short, expires: 2026-12-31}
"""


def load(text: str) -> policy.Policy:
    return policy.parse(text, Path("gate.yaml"))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("2026-12-31", "31.12.2026", "date"),
        ("confirm_pairs: 30", "confirm_pairs: 3", "confirm_pairs=3"),
        ("\ncompare:", "\n  - {suite: suites/gate.yaml}\ncompare:", "names a suite twice"),
    ],
)
def test_an_error_has_its_place_and_a_remedy(before: str, after: str, message: str) -> None:
    assert before in WHOLE

    with pytest.raises(SuiteError, match=r"gate\.yaml:") as refused:
        load(WHOLE.replace(before, after, 1))

    assert message in str(refused.value)


def test_the_schema_accepts_the_shipped_policy() -> None:
    assert policy.load(ROOT / "ci/gate.yaml").form.suites
    shipped = read((ROOT / "ci/gate.yaml").read_text(), "ci/gate.yaml").data
    jsonschema.validate(shipped, schema_of(policy.PolicyForm))
