"""The form of a suite file: what may stand where, and what each key means.

The models below validate a suite and yield its JSON Schema, which editors show as one types.
What concerns a suite's own names (an axis, a case to match) is in harness.suite.sweep.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from harness.records import METRICS, Scalar
from harness.suite.fields import (
    FACTORY,
    SUBJECT,
    AllowedOutcome,
    AxisName,
    Form,
    Matching,
    Name,
    Positive,
    Text,
    Value,
    Values,
    VariableName,
    checked,
    one_or_list,
    problem,
    schema_of,
    wrong,
)
from harness.suite.positions import Document, nearest


class MeasureModel(Form):
    """How a case is measured. What is not set here has the harness's default."""

    processes: Annotated[int, Field(ge=1)] | None = None
    """Fresh processes per case; one process never decides a comparison. Default 3."""
    min_samples: Annotated[int, Field(ge=1)] | None = None
    """Steady samples every process must take before it may stop. Default 5."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Steady samples after which a process stops. Default 200."""
    sample_s: Positive | None = None
    """Seconds after which a process stops sampling, once it has min_samples. Default 2."""
    warmup_s: Annotated[float, Field(ge=0)] | None = None
    """Longest time spent looking for the steady state. Default 20."""
    timeout_s: Positive | None = None
    """Longest life of one process; past it the case is a timeout. Default 300."""
    stall_s: Positive | None = None
    """Longest silence between two signs of progress; past it the case hangs. Default 120."""
    flush_l2: bool | None = None
    """Empty the GPU's L2 cache before every sample. Default false."""
    accuracy: bool | None = None
    """Compare with the reference before timing. Default true."""
    rotate_inputs: Annotated[int, Field(ge=1)] | None = None
    """Sets of inputs that take turns, so that no run finds its own in the cache. Default 1."""
    graph: bool | None = None
    """Time the replay of a CUDA graph that holds one run. Default false."""
    telemetry: bool | None = None
    """Read NVML and CPU while the worker works. Default true."""
    census: bool | None = None
    """Profile a few steps after the last sample: what ran, and where time goes. Of a program they
    are counted too, in one more process. Default true."""

    def given(self) -> dict[str, Any]:
        """The settings that are set, as fields of MeasureSettings."""
        return self.model_dump(exclude_unset=True, exclude={"match"})


class MeasureSomeModel(MeasureModel):
    """How some cases of a workload are measured."""

    match: Annotated[Matching, Field(min_length=1)]
    """Cases of this workload."""


class AllowModel(Form):
    """An outcome other than ok that is expected of some cases."""

    match: Matching = {}
    """Cases of this workload; all of them if absent."""
    outcome: AllowedOutcome
    reason: Text


class SomeEnvModel(Form):
    """Environment variables of some cases of a workload."""

    match: Annotated[Matching, Field(min_length=1)]
    """Cases of this workload."""
    set: Annotated[dict[VariableName, Value], Field(min_length=1)]


class PathModel(Form):
    """Names that must, and must not, be among those that ran; patterns (fnmatch)."""

    must: list[Text] = []
    """Each must fit at least one name."""
    must_not: list[Text] = []
    """None may fit any name."""

    @model_validator(mode="after")
    def _says_something(self) -> "PathModel":
        if not (self.must or self.must_not):
            raise wrong("needs must, must_not or both")
        return self


class PathSomeModel(PathModel):
    """The same of some cases."""

    match: Annotated[Matching, Field(min_length=1)]
    """Cases of this workload."""


Paths = Annotated[
    Annotated[PathModel, Tag("one")] | Annotated[list[PathSomeModel], Tag("list")],
    Discriminator(one_or_list),
]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise wrong(f"is no regular expression: {error}") from None
    return text


def _with_value(text: str) -> str:
    if VALUE not in re.compile(_pattern(text)).groupindex:
        named = f"(?P<{VALUE}>...)"
        raise wrong(f"has no group named {VALUE!r}", remedy=f"Put {named} around the number.")
    return text


def _one_or_mapping(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else "one"


VALUE = "value"
"""Group of a metric's regular expression that is the number."""
Pattern = Annotated[Text, AfterValidator(_pattern)]
Product = Annotated[
    Annotated[int, Field(ge=1), Tag("one")]
    | Annotated[
        list[Annotated[int, Field(ge=1)] | AxisName],
        Field(min_length=1),
        Tag("list"),
    ],
    Discriminator(one_or_list),
]


class ProgressModel(Form):
    """By which lines of output a program tells that it goes on."""

    step: Pattern
    """Regular expression of a line that means: a step is finished. Where it has the groups:
    `step` is how many are by now, `step_s` or `step_ms` what this one took. Without a time, the
    time between two such lines is taken."""
    alive: Pattern | None = None
    """Lines that are a sign of life, though no step: an evaluation, a checkpoint."""
    setup_steps: Annotated[int, Field(ge=0)] = 1
    """Steps that compile or fill caches, and are neither warm-up nor samples. Default 1."""
    until: Literal["exit", "sampled"] = "exit"
    """`sampled`: end the program when there are enough samples. `exit`: it runs to its own end."""


class ReadingModel(Form):
    """Where one metric of a program is read: `line`, `json`, or `file` with `json` or `csv`."""

    line: Annotated[Text, AfterValidator(_with_value)] | None = None
    """Regular expression with a group `value`, searched for in every line of output."""
    json_: Text | None = Field(default=None, alias="json")
    """Key of a JSON object that is a line of output, or stands in `file`: `train.loss`."""
    prefix: Text | None = None
    """What a JSON line begins with, before the object."""
    file: Text | None = None
    """Read when the program has ended, from its folder. One document, or one a line."""
    csv: Text | None = None
    """Column of `file`."""
    scale: Positive = 1.0
    """What is read times this is the value: 0.001 for milliseconds. Default 1."""
    take: Literal["all", "last"] = "all"
    """`last`: the last value counts; `all`: the median of them. Default all."""
    unit: Text | None = None
    """Of a metric that the harness does not know."""
    better: Literal["higher", "lower"] | None = None
    """Likewise: what is good."""

    @model_validator(mode="after")
    def _one_place(self) -> "ReadingModel":
        ways = [name for name, way in self._ways().items() if way]
        if len(ways) != 1:
            said = "needs" if not ways else f"says {' and '.join(ways)}; it needs"
            raise wrong(f"{said} one of line, json or csv")
        if (self.csv and not self.file) or (self.line and self.file):
            raise wrong("reads a file by json or csv, and output by line or json")
        if self.prefix and (self.file or not self.json_):
            raise wrong("goes with a JSON line of output, and with nothing else", key="prefix")
        return self

    def _ways(self) -> Mapping[str, str | None]:
        return {"line": self.line, "json": self.json_, "csv": self.csv}


_OF_PROGRAMS = ("cwd", "progress", "metrics", "tokens", "flops")


class WorkloadModel(Form):
    """One computation, swept over providers and axes."""

    name: Name
    """First part of the case ids."""
    factory: Annotated[str, Field(pattern=FACTORY)] | None = None
    """`package.module:function`; the worker calls it with provider and axes."""
    command: (
        Annotated[
            Annotated[Text, Tag("one")] | Annotated[list[Value], Field(min_length=1), Tag("list")],
            Discriminator(one_or_list),
        ]
        | None
    ) = None
    """Instead of a factory: a program and its arguments, as a list or as text that is split like
    a shell would, without one. `{axis}` is an axis, `{provider}` the provider, `{python}` in
    front the harness's interpreter; `{axis:--flag}` is an argument where the axis is true."""
    cwd: Text = "."
    """Folder of the program, seen from where the harness was started; where a gate or a bisection
    measures commits, from the root of each one's tree. Default there."""
    progress: (
        Annotated[
            Annotated[Pattern, Tag("one")] | Annotated[ProgressModel, Tag("mapping")],
            Discriminator(_one_or_mapping),
        ]
        | None
    ) = None
    """Lines of a program's output that mean a step is finished: a regular expression, or more."""
    metrics: dict[Name, ReadingModel] = {}
    """What a program tells of itself: `step_s`, `tokens_per_s`, `mfu`, `peak_memory_bytes`, or
    any other name with its unit and direction."""
    tokens: Product | None = None
    """Tokens of one step of a program: a number, or a list of numbers and axes to multiply."""
    flops: Product | None = None
    """Floating-point operations of one step of a program, likewise."""
    providers: Annotated[list[Name], Field(min_length=1)] = ["program"]
    """The implementations to measure. A program may do without."""
    axes: dict[AxisName, Values] = {}
    """A list is swept, a single value fixed. An UPPER_CASE axis is an environment variable of
    the worker as well."""
    zip: list[Annotated[list[AxisName], Field(min_length=2)]] = []
    """Groups of swept axes that advance together instead of being crossed."""
    exclude: list[Annotated[Matching, Field(min_length=1)]] = []
    """Combinations to leave out; every line must match at least one."""
    env: Annotated[
        Annotated[dict[VariableName, Value], Tag("one")]
        | Annotated[list[SomeEnvModel], Tag("list")],
        Discriminator(one_or_list),
    ] = {}
    """Environment variables of the worker: the same for all cases, or a list of `{match, set}`.
    A flag that is set for a case and that nothing asks for is a path_mismatch."""
    kernels: Paths | None = None
    """What must and must not run on the device: `{must, must_not}`, or a list of
    `{match, must, must_not}`. A breach is a path_mismatch; without a GPU it is not attested."""
    operators: Paths | None = None
    """The same of PyTorch's operators, as its profiler names them, on any device."""
    measure: Annotated[
        Annotated[MeasureModel, Tag("one")] | Annotated[list[MeasureSomeModel], Tag("list")],
        Discriminator(one_or_list),
    ] = MeasureModel()
    """Overrides the suite's: settings for all cases of the workload, or a list of settings, each
    with the cases it is for: `{match, timeout_s}`."""
    allow: Annotated[
        Annotated[dict[AllowedOutcome, Text], Tag("one")]
        | Annotated[list[AllowModel], Tag("list")],
        Discriminator(one_or_list),
    ] = {}
    """Outcomes expected here, each with the reason: `{timeout: why}`, or a list of
    `{match, outcome, reason}`."""

    @model_validator(mode="after")
    def _factory_or_program(self) -> "WorkloadModel":
        if (self.factory is None) == (self.command is None):
            raise wrong("needs a factory or a command, and not both")
        if self.factory is not None:
            if foreign := [key for key in _OF_PROGRAMS if key in self.model_fields_set]:
                raise wrong("goes with command, not with factory", key=foreign[0])
            if "providers" not in self.model_fields_set:
                raise wrong("needs providers beside its factory")
        return self


class RangeModel(Form):
    """Bounds of an expected number, in SI base units; at least one of them."""

    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "RangeModel":
        if self.low is None and self.high is None:
            raise wrong("needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise wrong(f"must not be above high, {self.high:g}", key="low")
        return self


if TYPE_CHECKING:
    _Bounds = Form
else:
    _Bounds = create_model(
        "_Bounds",
        __base__=Form,
        **{
            m.name: (RangeModel | None, Field(default=None, description=m.about or None))
            for m in METRICS.values()
            if m.of_case
        },
    )


class ExpectationModel(_Bounds):
    """What somebody expects of some cases, on a GPU, and on whose word. Names one metric."""

    match: Matching = {}
    gpu: Text = "*"
    """GPU the number was stated for, a pattern: `A100` means `*A100*`; `cpu` for no GPU."""
    source: Text
    """Who said so: a report, a data sheet, a runbook, with its date."""

    @model_validator(mode="after")
    def _one_metric(self) -> "ExpectationModel":
        if len(self.model_fields_set & METRICS.keys()) != 1:
            names = ", ".join(_Bounds.model_fields)
            raise wrong("must name exactly one metric", remedy=f"{names}.")
        return self

    @property
    def expected(self) -> tuple[str, RangeModel]:
        """The metric and its bounds."""
        (metric,) = self.model_fields_set & METRICS.keys()
        return metric, getattr(self, metric)


def metric_name(name: str) -> str:
    if name not in METRICS:
        raise wrong(f"must name a metric, not {name!r}", remedy=nearest(name, [*METRICS]))
    return name


class RuleModel(Form):
    """One line of the verdict. GO at `go` or better, NO-GO beyond `abort`, else CONDITIONAL."""

    name: Text
    metric: Annotated[Text, Field(json_schema_extra={"examples": [*METRICS]})]
    """One of the harness's metrics, or one that a program of the suite tells."""
    go: float
    abort: float | None = None
    """Without it, missing `go` is already NO-GO."""
    match: Matching = {}
    """The cases judged; all of them if absent."""
    quantifier: Literal["all", "any"] = "all"
    """`all`: every matched case must hold. `any`: the best one decides."""
    axis: str | None = None
    """For scaling_exponent: the axis it is fitted over."""
    gpu: Text = "*"
    """Pattern of the GPUs the rule speaks of."""

    @model_validator(mode="after")
    def _sensible(self) -> "RuleModel":
        if self.metric == "scaling_exponent" and self.axis is None:
            raise wrong("needs an axis to be fitted over", key="metric", remedy="Add axis.")
        if self.metric != "scaling_exponent" and self.axis is not None:
            raise wrong("goes with scaling_exponent and with nothing else", key="axis")
        return self

    def contrary(self, *, higher_is_better: bool) -> str:
        """What is wrong with `abort`, if anything is."""
        if self.abort is None or self.abort == self.go:
            return ""
        good = "high" if higher_is_better else "low"
        if (self.abort > self.go) != higher_is_better:
            return ""
        return f"must be worse than go, and {self.metric} is good when {good}"


class RequiresModel(Form):
    """What the machine must be for the numbers to mean what they are taken for."""

    gpu: Text | None = None
    """Pattern of the GPU's name; `H200` means `*H200*`."""
    driver: Text | None = None
    """Pattern of the driver's version, such as `580.*`."""


class CostModel(Form):
    """The training run that the report extrapolates to."""

    steps: Annotated[int, Field(ge=1)]
    match: Matching = {}
    """The cases to extrapolate from."""
    usd_per_gpu_hour: Positive | None = None


class SuiteModel(Form):
    """What to measure, what is expected of it, and what decides."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format."""
    title: Text
    subject: Annotated[str, Field(pattern=SUBJECT)]
    """Goes into the report's file name."""
    question: Text
    """What the suite is there to answer."""
    device: Literal["any", "cuda", "cpu"] = "any"
    """`cuda` refuses to run without an NVIDIA GPU; `cpu` uses none where there is one."""
    requires: RequiresModel = RequiresModel()
    """Where the machine is another, every case ends as invalid_environment."""
    measure: MeasureModel = MeasureModel()
    workloads: Annotated[list[WorkloadModel], Field(min_length=1)]
    expectations: list[ExpectationModel] = []
    verdict: list[RuleModel] = []
    cost: CostModel | None = None


def validate(document: Document) -> SuiteModel:
    """Check the form of a parsed suite.

    Raises:
        SuiteError: With the place of the first problem and the nearest valid name, and the
            next few problems in short.
    """
    return checked(SuiteModel, document)


def measure_setting(name: str, value: Scalar) -> Mapping[str, Any]:
    """One checked setting of MeasureSettings, as `{name: value}`.

    Raises:
        ValueError: With problem and remedy as its two arguments.
    """
    try:
        return MeasureModel.model_validate({name: value}).given()
    except ValidationError as error:
        found = problem(error.errors(include_url=False)[0], {name: value})
        raise ValueError(found.text, found.remedy) from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a suite file, for editors."""
    return schema_of(SuiteModel)
