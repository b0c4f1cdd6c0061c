"""What a worker answers for a case, in the process of the test."""

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from harness.messages import Answer, Channel, MeasureOrder, Message, MessageReader, StepsDone
from harness.records import Case, Measurement, OverSteps
from harness.worker import answer


def answered(case: Case, **order: Any) -> Measurement:
    """Its measurement, with the steps that it reported; the variables of the case are set.

    Args:
        order: Fields of MeasureOrder, to change its process or when it was launched.
    """
    answers, end = os.pipe()
    os.set_blocking(answers, False)
    asked = {"process": 0, "launched_at": time.monotonic(), **order}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in case.env.items():
            patch.setenv(name, value)
        answer.work(MeasureOrder(case=case, **asked), Channel(end))
    os.close(end)
    sent: list[Message] = []
    MessageReader(answers).drain(sent.append)
    os.close(answers)
    (found,) = (m.measurement for m in sent if isinstance(m, Answer) and m.final)
    parts = [m.over_steps for m in sent if isinstance(m, StepsDone) and m.over_steps]
    return replace(found, over_steps=OverSteps.joined(parts))
