"""The frozen records that all rooms share: what a suite asks, what a worker measures, what follows.

No records come in: this room imports no other. All rooms get their records from here, and the
suites of any commit do too: `from harness.records import Scalar`.
"""

# ruff: noqa: F403
# mypy: implicit-reexport

from harness.records.asked import *
from harness.records.comparison import *
from harness.records.environment import *
from harness.records.judged import *
from harness.records.measured import *
from harness.records.metrics import *
from harness.records.outcome import *
from harness.records.profile import *
from harness.records.program import *
