"""The form of a suite file: its keys and what they mean. The part that decides is in
harness.suite.decisions.

The models validate a suite and give its JSON Schema, which editors show. Where a record says the
same (settings, rules, suspects), its form is made from the record. Checks of names that a suite
defines itself (axes, cases) are in harness.suite.sweep and harness.suite.program.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, model_validator

from harness.records import Match, MeasureSettings
from harness.suite.decisions import Cost, Diagnosis, LabelModel, StatedExpectation, StatedRule
from harness.suite.fields import (
    FACTORY,
    SUBJECT,
    AllowedOutcome,
    AxisName,
    Form,
    Matching,
    Name,
    OneOrList,
    Positive,
    Some,
    SomeMatching,
    Text,
    Value,
    Values,
    VariableName,
    form_of,
    problem,
    schema_of,
    wrong,
)
from harness.suite.requires import RequiresModel

_Count = Annotated[int, Field(ge=1)]
_Processes = Annotated[int, Field(ge=1, le=1000)]


def _one_or_mapping(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else "one"


class ProcessesModel(Form):
    """Processes per case: fewest and most."""

    from_: _Processes = Field(default=2, alias="from")
    """Of every case."""
    to: _Processes
    """Of a case that leaves a rule, an expectation that counts or a suspect open."""

    @model_validator(mode="after")
    def _ascending(self) -> "ProcessesModel":
        if self.to < self.from_:
            raise wrong(f"is below from, {self.from_}", key="to")
        return self


if TYPE_CHECKING:
    _Settings = Form
else:
    _Settings = form_of(
        MeasureSettings,
        ("most_processes",),
        processes=Annotated[
            Annotated[_Processes, Tag("one")] | Annotated[ProcessesModel, Tag("mapping")],
            Discriminator(_one_or_mapping),
        ],
        min_samples=_Count,
        max_samples=_Count,
        sample_s=Positive,
        warmup_s=Annotated[float, Field(ge=0)],
        timeout_s=Positive,
        stall_s=Positive,
    )


class MeasureModel(_Settings):
    """How a case is measured. Settings that are absent have the default of the harness."""

    def given(self) -> dict[str, Any]:
        """The settings that are present, as fields of MeasureSettings."""
        given = self.model_dump(exclude_unset=True, exclude={"match", "processes"})
        if "processes" in self.model_fields_set:
            stated = dict(self)["processes"]
            several = isinstance(stated, ProcessesModel)
            given["processes"] = stated.from_ if several else stated
            given["most_processes"] = stated.to if several else 0
        return given


class SomeModel(Form):
    """What is for some cases of a workload."""

    match: SomeMatching
    """Cases of this workload."""


class MeasureSomeModel(MeasureModel, SomeModel):
    """How some cases of a workload are measured."""


class AllowModel(Form):
    """An expected outcome of some cases other than ok."""

    match: Annotated[Matching, Field(default_factory=Match)]
    """Cases of this workload; all of them if absent."""
    outcome: AllowedOutcome
    reason: Text


class SomeEnvModel(SomeModel):
    """Environment variables of some cases of a workload."""

    set: Annotated[dict[VariableName, Value], Field(min_length=1)]


class PathModel(Form):
    """Names that must run and must not run; patterns (fnmatch)."""

    must: list[Text] = []
    """Each must match at least one name."""
    must_not: list[Text] = []
    """Each must match no name."""

    @model_validator(mode="after")
    def _says_something(self) -> "PathModel":
        if not (self.must or self.must_not):
            raise wrong("needs must, must_not or both")
        return self


class PathSomeModel(PathModel, SomeModel):
    """The same of some cases."""


Paths = OneOrList[PathModel, list[PathSomeModel]]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise wrong(f"is not a regular expression: {error}") from None
    return text


def _with_value(text: str) -> str:
    if VALUE not in re.compile(_pattern(text)).groupindex:
        named = f"(?P<{VALUE}>...)"
        raise wrong(f"has no group named {VALUE!r}", remedy=f"Put {named} around the number.")
    return text


VALUE = "value"
"""Group of a metric's regular expression that is the number."""
Pattern = Annotated[Text, AfterValidator(_pattern)]
Factor = Annotated[
    Annotated[int, Field(ge=1), Tag("number")] | Annotated[AxisName, Tag("axis")],
    Discriminator(lambda value: "axis" if isinstance(value, str) else "number"),
]
Product = OneOrList[Factor, Some[Factor]]


class ProgressModel(Form):
    """Lines of output that show the progress of a program."""

    step: Pattern
    """Regular expression of the line after each step. Optional groups: `step`, the number of
    finished steps; `step_s` or `step_ms`, the duration of this one. Without a duration, the time
    between two such lines counts."""
    setup_steps: Annotated[int, Field(ge=0)] = 1
    """Steps that compile or fill caches; neither warm-up nor samples. Default 1."""
    until: Literal["exit", "sampled"] = "exit"
    """`sampled`: end the program after enough samples. `exit`: let it run to its end."""


class ReadingModel(Form):
    """Where a metric of a program is read: `line` or `json`."""

    line: Annotated[Text, AfterValidator(_with_value)] | None = None
    """Regular expression with a group `value`, searched in every line of output."""
    json_: Text | None = Field(default=None, alias="json")
    """Key of a JSON object in a line of output: `train.loss`."""
    prefix: Text | None = None
    """Text before the object in a JSON line."""
    scale: Positive = 1.0
    """Factor from the number to the value: 0.001 for milliseconds. Default 1."""
    take: Literal["all", "last"] = "all"
    """`last`: the last value counts; `all`: the median. Default all."""
    unit: Text | None = None
    """Only for a metric that the harness does not know."""
    better: Literal["higher", "lower"] | None = None
    """Likewise: which direction is good."""

    @model_validator(mode="after")
    def _one_place(self) -> "ReadingModel":
        if bool(self.line) == bool(self.json_):
            given = "has line and json, but " if self.line else ""
            raise wrong(f"{given}needs one of line or json")
        if self.prefix and not self.json_:
            raise wrong("needs json", key="prefix")
        return self


_PROGRAM_ONLY = ("cwd", "progress", "metrics", "tokens", "flops", "gpus", "world_size")


class WorkloadModel(Form):
    """One computation, swept over providers and axes."""

    name: Name
    """First part of the case ids."""
    factory: Annotated[str, Field(pattern=FACTORY)] | None = None
    """`package.module:function`, which the worker calls with provider and axes."""
    command: OneOrList[Text, Some[Value]] | None = None
    """Instead of a factory: a program and its arguments, as a list or as text that is split like in
    a shell. `{axis}` is an axis, `{provider}` the provider, `{python}` as first word the
    interpreter of the harness; `{axis:--flag}` is an argument if the axis is true."""
    cwd: Text = "."
    """Folder of the program, relative to the folder of the harness command, or in a gate or a
    bisection to the root of each commit's tree. Default `.`."""
    progress: (
        Annotated[
            Annotated[Pattern, Tag("one")] | Annotated[ProgressModel, Tag("mapping")],
            Discriminator(_one_or_mapping),
        ]
        | None
    ) = None
    """Lines of a program's output that mark a step: a regular expression, or a mapping."""
    metrics: dict[Name, ReadingModel] = {}
    """Metrics that a program reports: `step_s`, `tokens_per_s`, `mfu`, `peak_memory_bytes`, or any
    other name with unit and direction."""
    tokens: Product | None = None
    """Tokens of one step of a program: a number, an axis, or a list of both to multiply."""
    flops: Product | None = None
    """Floating-point operations of one step of a program, likewise."""
    gpus: Product | None = None
    """GPUs that a program needs, likewise. With fewer on the machine the outcome is unsupported; a
    program that needs one also runs without."""
    world_size: Product | None = None
    """Ranks of a distributed program, likewise: the harness starts this many processes of the
    command, with the variables of torchrun. On a GPU each needs one. Not with `gpus`, which is for
    a command that starts its processes itself."""
    providers: Some[Name] = ["program"]
    """The implementations to measure. Optional for a program."""
    axes: dict[AxisName, Values] = {}
    """A list is swept, a single value fixed. An UPPER_CASE axis is also an environment variable of
    the worker."""
    zip: list[Annotated[list[AxisName], Field(min_length=2)]] = []
    """Groups of swept axes that vary together instead of being crossed."""
    exclude: list[SomeMatching] = []
    """Combinations to exclude; every entry must match at least one."""
    env: OneOrList[dict[VariableName, Value], list[SomeEnvModel]] = {}
    """Environment variables of the worker: for all cases, or a list of `{match, set}`. A flag that
    a case sets and no code reads is a path_mismatch."""
    kernels: Paths | None = None
    """Kernels that must and must not run: `{must, must_not}`, or a list of
    `{match, must, must_not}`. A violation is a path_mismatch; nothing is checked without a GPU."""
    operators: Paths | None = None
    """Likewise for PyTorch's operators by their names in the profiler, on any device."""
    measure: OneOrList[MeasureModel, list[MeasureSomeModel]] = Field(default_factory=MeasureModel)
    """Overrides settings of the suite, for all cases of the workload or in a list for some:
    `{match, timeout_s}`."""
    allow: OneOrList[dict[AllowedOutcome, Text], list[AllowModel]] = {}
    """Expected outcomes with their reasons: `{timeout: why}`, or a list of
    `{match, outcome, reason}`."""

    nondeterministic: Text | None = None
    """Why processes of one case may compute different outputs, such as atomic additions. If absent,
    a difference leaves the verdict INCONCLUSIVE."""

    @model_validator(mode="after")
    def _factory_or_program(self) -> "WorkloadModel":
        if (self.factory is None) == (self.command is None):
            raise wrong("needs either a factory or a command")
        if self.factory is not None:
            if foreign := [key for key in _PROGRAM_ONLY if key in self.model_fields_set]:
                raise wrong("goes with command, not with factory", key=foreign[0])
            if "providers" not in self.model_fields_set:
                raise wrong("needs providers with a factory")
        if self.gpus is not None and self.world_size is not None:
            raise wrong(
                "needs gpus or world_size, not both",
                key="gpus",
                remedy="Remove gpus: each of the world_size ranks needs a GPU.",
            )
        return self


class DecidesFor(Form):
    """What decides; the other answers stand beside the verdict."""

    gpu: Text = ""
    """Pattern of the GPU that the question is about. A run on another GPU is never GO."""
    parts: list[Name] = []
    """The parts of the question that decide; all if absent."""


class SuiteModel(Form):
    """What to measure, what is expected, and which rules decide."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format."""
    title: Text
    subject: Annotated[str, Field(pattern=SUBJECT)]
    """Part of the report's file name."""
    question: Text | Annotated[dict[Name, Text], Field(min_length=1)]
    """The question that the suite answers, or its parts by name: some rule asks each of them."""
    decides_for: Text | DecidesFor = Field(default_factory=DecidesFor)
    """Pattern of the GPU that the question is about, or what decides."""
    labels: list[LabelModel] = []
    """Short names for cases in the answer of a report: all that fit a case are joined; of those
    that name the same axis, the first."""
    axis_names: dict[str, Text] = {}
    """Short names of the axes that no label names: `{seq_len: T}`."""
    provider_names: dict[str, Text] = {}
    """Names of providers for people, of all workloads or one: `{nsa: NSA eager, fast/nsa: NSA
    Triton}`."""
    peers: list[Name] = []
    """Providers that the subject is compared with: if one fails, the comparison has a gap, and the
    verdict does not change."""
    device: Literal["any", "cuda", "cpu"] = "any"
    """`cuda` refuses to run without an NVIDIA GPU; `cpu` never uses a GPU."""
    requires: OneOrList[RequiresModel, Some[RequiresModel]] = RequiresModel()
    """What the machine must have, or a list, of which some may say `else: note`."""
    measure: Annotated[MeasureModel, Field(default_factory=MeasureModel)]
    workloads: Annotated[list[WorkloadModel], Field(min_length=1)]
    expectations: list[StatedExpectation] = []
    verdict: list[StatedRule] = []
    cost: Cost | None = None
    suspects: Diagnosis | None = None
    """What could explain a number that somebody saw."""

    @property
    def deciding(self) -> DecidesFor:
        given = self.decides_for
        return DecidesFor(gpu=given) if isinstance(given, str) else given

    @property
    def needs(self) -> list[RequiresModel]:
        return self.requires if isinstance(self.requires, list) else [self.requires]


def measure_setting(name: str, value: Any) -> Mapping[str, Any]:
    """One checked field of MeasureSettings, as `{name: value}`.

    Raises:
        ValueError: With problem and remedy as arguments.
    """
    try:
        return MeasureModel.model_validate({name: value}).given()
    except ValidationError as error:
        found = problem(error.errors(include_url=False)[0], {name: value})
        raise ValueError(found.text, found.remedy) from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a suite file, for editors."""
    return schema_of(SuiteModel)
