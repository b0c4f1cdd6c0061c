"""The form of a suite file: its keys and what they mean, for validation and for editors.

The part that decides is in harness.suite.decisions; names that a suite defines itself (axes, cases)
are checked in harness.suite.sweep and harness.suite.program.
"""

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from harness.records import Match, MeasureSettings, MetricSource, Scalar, Steps
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
    one_or_list,
    problem,
    reads,
    text_as,
    wrong,
)

_Count = Annotated[int, Field(ge=1)]
_Processes = Annotated[int, Field(ge=1, le=1000)]


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
            Discriminator(lambda value: "mapping" if isinstance(value, dict) else "one"),
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

    match: Annotated[Matching, Field(default_factory=Match)]
    """Cases of this workload; all of them if absent."""


class MeasureSomeModel(MeasureModel, SomeModel):
    """How some cases of a workload are measured."""


class AllowModel(SomeModel):
    """An expected outcome of some cases other than ok."""

    outcome: AllowedOutcome
    reason: Text


class SomeEnvModel(SomeModel):
    """Environment variables of some cases of a workload."""

    set: Annotated[dict[VariableName, Value], Field(min_length=1)]


_variables = BeforeValidator(
    lambda given: [{"set": given}] if isinstance(given, dict) else given,
    json_schema_input_type=dict[VariableName, Value] | list[SomeEnvModel],
)


class PathModel(SomeModel):
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
Product = Annotated[Some[Factor], one_or_list(Factor)]


def _words(command: Any) -> Any:
    """The words of a command; a text is split as a shell splits it."""
    if not isinstance(command, str):
        return command
    try:
        return shlex.split(command)
    except ValueError as error:
        raise wrong(f"cannot be split: {error}", remedy="Use a list.") from None


as_words = BeforeValidator(_words, json_schema_input_type=Text | Some[Value])


def _one_place(source: MetricSource) -> MetricSource:
    if bool(source.line) == bool(source.json):
        given = "has line and json, but " if source.line else ""
        raise wrong(f"{given}needs one of line or json")
    if source.prefix and not source.json:
        raise wrong("needs json", key="prefix")
    return source


_NotNegative = Annotated[int, Field(ge=0)]
_Until = Literal["exit", "sampled"]
Progress = Annotated[Steps, reads(Steps, step=Pattern, setup_steps=_NotNegative, until=_Until)]
Reading = Annotated[
    MetricSource,
    reads(
        MetricSource,
        leave=("metric",),
        line=Annotated[Text, AfterValidator(_with_value)],
        scale=Positive,
        take=Literal["all", "last"],
        better=Literal["higher", "lower"],
    ),
    AfterValidator(_one_place),
]


_PROGRAM_ONLY = ("cwd", "progress", "metrics", "tokens", "gpus", "world_size")


class WorkloadModel(Form):
    """One computation, swept over providers and axes."""

    name: Name
    """First part of the case ids."""
    factory: Annotated[str, Field(pattern=FACTORY)] | None = None
    """`package.module:function`, which the worker calls with provider and axes."""
    command: Annotated[Some[Value], as_words] | None = None
    """Instead of a factory: a program and its arguments, with `{axis}`, `{provider}`, `{python}` as
    first word for the interpreter of the harness, and `{axis:--flag}` for an axis that is true."""
    cwd: Text = "."
    """Folder of the program, relative to that of the command, or to the root of a commit's tree."""
    progress: Annotated[Progress, text_as("step", Progress)] | None = None
    """Lines of a program's output that mark a step: a regular expression, or a mapping."""
    metrics: dict[Name, Reading] = {}
    """Metrics that a program reports: `step_s`, `mfu`, or any other with unit and direction."""
    tokens: Product = []
    """Tokens of one step of a program: a number, an axis, or a list of both to multiply."""
    gpus: Product = []
    """GPUs that a program needs, likewise; with fewer it is unsupported."""
    world_size: Product = []
    """Ranks of a distributed program, likewise: processes of the command that the harness starts,
    with the variables of torchrun. Not with `gpus`, for a command that starts them itself."""
    providers: Some[Name] = ["program"]
    """The implementations to measure. Optional for a program."""
    axes: dict[AxisName, Values] = {}
    """A list is swept, a single value fixed. UPPER_CASE: also an environment variable."""
    zip: list[Annotated[list[AxisName], Field(min_length=2)]] = []
    """Groups of swept axes that vary together instead of being crossed."""
    exclude: list[SomeMatching] = []
    """Combinations to exclude; every entry must match at least one."""
    env: Annotated[list[SomeEnvModel], _variables] = []
    """Environment variables of the worker: for all cases, or a list of `{match, set}`."""
    kernels: Annotated[list[PathModel], one_or_list(PathModel)] = []
    """Kernels that must and must not run on a GPU; a violation is a path_mismatch."""
    operators: Annotated[list[PathModel], one_or_list(PathModel)] = []
    """Likewise for PyTorch's operators by their names in the profiler, on any device."""
    measure: Annotated[list[MeasureSomeModel], one_or_list(MeasureSomeModel)] = []
    """Overrides settings of the suite, for all cases or a list for some: `{match, timeout_s}`."""
    allow: OneOrList[dict[AllowedOutcome, Text], list[AllowModel]] = {}
    """Expected outcomes: `{timeout: why}`, or a list of `{match, outcome, reason}`."""
    nondeterministic: Text | None = None
    """Why processes of a case may differ in outputs; without it the verdict is INCONCLUSIVE."""

    @model_validator(mode="after")
    def _factory_or_program(self) -> "WorkloadModel":
        if (self.factory is None) == (self.command is None):
            raise wrong("needs either a factory or a command")
        if self.factory is not None:
            if foreign := [key for key in _PROGRAM_ONLY if key in self.model_fields_set]:
                raise wrong("goes with command, not with factory", key=foreign[0])
            if "providers" not in self.model_fields_set:
                raise wrong("needs providers with a factory")
        if self.gpus and self.world_size:
            remedy = "Remove gpus: each of the world_size ranks needs a GPU."
            raise wrong("needs gpus or world_size, not both", key="gpus", remedy=remedy)
        return self


def _bound(text: str) -> str:
    if text[:1] in "<>=!~":
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            raise wrong("must be a bound such as '>=2' or '>=2,<3'") from None
    return text


Bound = Annotated[Text, AfterValidator(_bound)]
"""A bound such as `>=2`, or a pattern such as `580.*`."""


class RequiresModel(Form):
    """What the machine must have before the first case; else the run ends there, with exit status
    2. Checked by `harness run --dry-run` too."""

    gpu: OneOrList[Text, Some[Text]] | None = None
    """Pattern of the GPU's name, or a list: `H200` means `*H200*`."""
    gpus: _Count | None = None
    """GPUs that a worker must see."""
    driver: Bound | None = None
    """Of its version: `>=535`, or a pattern such as `580.*`."""
    gpu_free_bytes: Positive | None = None
    """Free memory of the GPU before the first case."""
    packages: dict[Name, Bound] = {}
    """Installed package -> its version: `>=2`, or `*` for any. Also python, cuda and cudnn."""
    torch: dict[Name, Scalar] = {}
    """Settings of torch, as a workload finds them: allow_tf32_matmul, num_threads and others."""
    variables: dict[VariableName, Text] = {}
    """Environment variable of the run -> pattern of its value; `*` if it must be set."""
    else_: Literal["note"] | None = Field(default=None, alias="else")
    """`note`: without it the suite goes on, and the report says so."""

    def stated(self) -> Mapping[str, Scalar]:
        """Key, or `key.name` -> what is required."""
        flat: dict[str, Scalar] = {}
        for key, value in self.model_dump(exclude={"else_"}, exclude_none=True).items():
            if isinstance(value, dict):
                flat |= {f"{key}.{name}": one for name, one in value.items()}
            else:
                flat[key] = "|".join(value) if isinstance(value, list) else value
        return flat


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
    decides_for: Annotated[DecidesFor, text_as("gpu", DecidesFor)] = DecidesFor()
    """Pattern of the GPU that the question is about, or what decides."""
    labels: list[LabelModel] = []
    """Short names for cases: all that fit are joined; of those for the same axis, the first."""
    axis_names: dict[str, Text] = {}
    """Short names of the axes that no label names: `{seq_len: T}`."""
    provider_names: dict[str, Text] = {}
    """Names of providers for people, of all workloads or one: `{fast/nsa: NSA Triton}`."""
    peers: list[Name] = []
    """Providers that the subject is compared with; one that fails leaves a gap, no NO-GO."""
    device: Literal["any", "cuda", "cpu"] = "any"
    """`cuda` refuses to run without an NVIDIA GPU; `cpu` never uses a GPU."""
    requires: Annotated[list[RequiresModel], one_or_list(RequiresModel)] = []
    """What the machine must have, or a list, of which some may say `else: note`."""
    measure: Annotated[MeasureModel, Field(default_factory=MeasureModel)]
    workloads: Annotated[list[WorkloadModel], Field(min_length=1)]
    expectations: list[StatedExpectation] = []
    verdict: list[StatedRule] = []
    cost: Cost | None = None
    suspects: Diagnosis | None = None
    """What could explain a number that somebody saw."""


def measure_setting(name: str, value: Any) -> Mapping[str, Any]:
    """One checked field of MeasureSettings, or a ValueError with problem and remedy."""
    try:
        return MeasureModel.model_validate({name: value}).given()
    except ValidationError as error:
        found = problem(error.errors(include_url=False)[0], {name: value})
        raise ValueError(found.text, found.remedy) from None
