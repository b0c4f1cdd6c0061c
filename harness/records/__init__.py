"""The frozen records that all rooms share: what a suite asks, what a worker measures, what follows.

No records come in: this room imports no other. All rooms get their records from here, and the
suites of any commit do too: `from harness.records import Scalar`.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from harness.records.asked import (
    Case,
    CostPlan,
    Expectation,
    Gap,
    Match,
    MeasureSettings,
    Observation,
    Rule,
    Suite,
    Suspect,
    Suspects,
    Weight,
    equal_pairs,
)
from harness.records.comparison import ByCase, Change, Comparison, Pair, Thresholds, least_pairs
from harness.records.environment import (
    VARIABLE_PREFIXES,
    Check,
    Environment,
    Git,
    Gpu,
    Grade,
    Vitals,
    gpu_matches,
    joined,
)
from harness.records.evidence import ActivitySample, Evidence, EvidenceFile, NonFiniteOrigin
from harness.records.judged import (
    WORST_FIRST,
    CaseSummary,
    Decision,
    Estimate,
    Fact,
    Finding,
    RuleResult,
    Verdict,
)
from harness.records.measured import (
    MIN_STEP_S,
    SCHEMA_VERSION,
    Accuracy,
    Measurement,
    OverSteps,
    Phase,
    Run,
    Telemetry,
    TensorDigest,
    TensorError,
    bounded,
    of_rank,
    require_counts,
    require_times,
)
from harness.records.metrics import METRICS, OVER_STEPS, Metric
from harness.records.outcome import FAILURES, Clock, Outcome, Scalar, Stop, as_text
from harness.records.profile import (
    COUNTERS,
    LINES,
    MAX_USES,
    OPTIMIZER,
    SAME_STEP,
    Breakdown,
    Counters,
    PathRule,
    Profile,
    Use,
    by_range,
)
from harness.records.program import INTERPRETER, REPORTED, MetricSource, Program, Rank, Steps
from harness.records.self_test import Peaks, SelfTest, SelfTestCheck, SelfTestReadings
