"""The policy of a gate: its cases, thresholds and stage, and the cases that are exempt.

ci/gate.yaml is read like a suite: YAML 1.2 with positions, validated by the models below, which
also give its JSON Schema. Case patterns are checked against the suites.
"""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.records import Thresholds
from harness.suite.fields import Form, Text, checked, form_of, read_as, wrong
from harness.suite.load import text_of
from harness.suite.positions import Problem, read

DEFAULT = Path("ci/gate.yaml")
NOISY_CV = 0.014
"""Standard deviation between processes of one case from which the case is noisy: the geometric
mean of a typical node's 0.8 % and a noisy one's 2.5 %."""
NOISY_TOLERANCE = 0.05
"""A noisy case passes below this. Few of its clean cases could be bounded by the usual 3 %."""


class ChosenSuite(Form):
    """A suite, and the cases of it that the gate judges."""

    suite: Text
    """Path of the suite file from the root of the repository."""
    cases: list[Text] = Field(default_factory=list)
    """Patterns or parts of case ids, as for `harness run --filter`; all if absent."""


CompareForm = form_of(
    Thresholds, leave=("build_cv",), most_pairs=Annotated[int, Field(ge=1)]
)  # the record checks the others


class Exemption(Form):
    """Cases whose comparison does not decide the gate, until a date."""

    cases: Annotated[list[Text], Field(min_length=1)]
    """Patterns or parts of case ids."""
    because: Text
    expires: Annotated[datetime.date, Field(strict=False)]
    """Last day. From the next day on the entry excuses nothing."""


class PolicyForm(Form):
    """What a gate judges, and what blocks a change."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format."""
    stage: Literal["shadow", "warn", "block"]
    """`shadow` records, `warn` shows, `block` prevents the merge of a NO-GO."""
    inconclusive: Literal["neutral", "block"] = "neutral"
    """Whether an undecided gate blocks in stage block. It is never shown as a pass."""
    roots: Annotated[list[Text], Field(min_length=1, default_factory=lambda: ["."])]
    """Folders of the repository from which its packages are imported."""
    suites: Annotated[list[ChosenSuite], Field(min_length=1)]
    """Suites that are timed."""
    counters: Annotated[list[ChosenSuite], Field(default_factory=list)]
    """Suites that `harness gate --counters` counts: small cases that run anywhere."""
    compare: Annotated[Any, read_as(CompareForm)] = CompareForm()
    """Thresholds of the comparison that differ from the defaults."""
    exempt: Annotated[list[Exemption], Field(default_factory=list)]
    """Cases whose comparison does not decide, each until a date."""

    @model_validator(mode="after")
    def _once(self) -> "PolicyForm":
        for key in ("suites", "counters"):
            names = [choice.suite for choice in getattr(self, key)]
            if len(names) > len(set(names)):
                raise wrong("names a suite twice", key=key, remedy="Put its cases in one entry.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy file, validated."""

    path: str
    """From the root of the repository."""
    form: PolicyForm

    @property
    def given(self) -> Mapping[str, Any]:
        """The thresholds that the file itself sets; the scatter of pairs changes only others."""
        found: dict[str, Any] = self.form.compare.model_dump(exclude_unset=True)
        pairs = {"most_pairs": found["confirm_pairs"]} if "confirm_pairs" in found else {}
        return pairs | found

    def thresholds(self, pair_sd: float = 0.0) -> Thresholds:
        """Of a case whose pairs have this standard deviation."""
        return by_scatter(Thresholds(**self.given), self.given, pair_sd / math.sqrt(2))


def by_scatter(thresholds: Thresholds, given: Mapping[str, Any], process_cv: float) -> Thresholds:
    """The thresholds of a case whose processes scatter so far; those that the policy sets stay."""
    if process_cv <= NOISY_CV or "tolerance" in given:
        return thresholds
    return replace(thresholds, tolerance=min(NOISY_TOLERANCE, thresholds.stored_tolerance))


def load(path: Path) -> Policy:
    """Read a policy; a SuiteError has place, problem and remedy."""
    return parse(text_of(path, path, "Name one with --policy, or write one: harness init."), path)


def parse(text: str, path: Path) -> Policy:
    """The same for the text of the file, perhaps from another commit."""
    document = read(text, path, least="Write one: harness init.")
    policy = Policy(path=str(path), form=checked(PolicyForm, document))
    try:
        Thresholds(**policy.given)
    except ValueError as error:
        raise document.error([Problem(("compare",), str(error), at_key=True)]) from None
    return policy
