"""How a worker answers for one case, in this process: its settings, and the outcome of an error."""

import errno
import math
import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.measure import profile
from harness.messages import REPORTED_STEPS, WorkerReporter
from harness.records import Case, Outcome, PathRule
from harness.tests.answers import answered
from harness.tests.commands import steps_of
from harness.tests.fake_workloads import good
from harness.tests.faulty import evidence_of
from harness.tests.faulty import make_case as faulty_case
from harness.tests.workers import QUICK, make_case
from harness.workload import Unsupported, Workload

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def own(fake: str, **axes: Any) -> Case:
    """The case of a workload of this file."""
    return replace(make_case("", axes=axes), factory=f"{__name__}:{fake}")


def raises(provider: str, axes: Any) -> Workload:
    """A workload whose run raises the `error` of the axes."""

    def run() -> None:
        raise axes["error"]

    return Workload(run=run)


def replays(provider: str, axes: Any) -> Workload:
    return replace(good(provider, axes), unreplayed=print)


def counts_up(provider: str, axes: Any) -> Workload:
    steps = count(1.0)
    return Workload(run=lambda: torch.tensor(next(steps)))


def trains(provider: str, axes: Any) -> Workload:
    """So many steps, whose loss is their number, NaN at step `bad`; fp16 leaves out step 2."""
    steps = count(1)
    taken = list[int]()

    def run() -> dict[str, torch.Tensor]:
        taken.append(next(steps))
        return {"loss": torch.tensor(math.nan if taken[-1] == axes["bad"] else float(taken[-1]))}

    def recorded() -> dict[str, Any]:
        norm = math.inf if taken[-1] == 2 else 1 / 3
        return {"loss": float(taken[-1]), "grad_norm": torch.tensor(norm)}

    return Workload(run=run, steps=axes["steps"], recorded=recorded, stateful=True)


def wrong_after_a_while(provider: str, axes: Any) -> Workload:
    """`check` and the first output are right."""
    steps, right = count(), torch.ones(8)
    return replace(good(provider, axes), run=lambda: right + (next(steps) > 2), stateful=False)


def remembers(provider: str, axes: Any) -> Workload:
    """A kernel that keeps its last output, behind the address or the values of its input."""
    x, kept = torch.zeros(8), dict[object, torch.Tensor]()

    def run() -> torch.Tensor:
        key = x.data_ptr() if axes["by"] == "address" else float(x.sum())
        if key not in kept:
            time.sleep(0.01)
            kept.clear()
            kept[key] = x + 1
        return kept[key]

    return Workload(run=run, fresh=lambda i: x.fill_(i))  # type: ignore[arg-type]


def test_the_step_without_its_graph_reaches_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[profile.ProfileRequest] = []

    def take(run: object, ask: profile.ProfileRequest) -> profile.StepProfile:
        asked.append(ask)
        return profile.without_profile("not here")

    monkeypatch.setattr(profile, "take", take)

    assert answered(own("replays")).outcome is Outcome.OK
    assert [ask.unreplayed for ask in asked] == [print]


def noted(error: Exception) -> Exception:
    error.add_note("a note of the caller")
    return error


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (Unsupported("head_dim=7"), Outcome.UNSUPPORTED, "head_dim=7"),
        (MemoryError(), Outcome.OUT_OF_MEMORY, "GB in the process"),
        (torch.OutOfMemoryError("80.00 GiB"), Outcome.OUT_OF_MEMORY, "80.00 GiB"),
        (RuntimeError("CUDA error: out of memory"), Outcome.OUT_OF_MEMORY, "CUDA error"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"), Outcome.OUT_OF_MEMORY, "CUBLAS"),
        (FULL, Outcome.INVALID_ENVIRONMENT, "No space left on device"),
        (noted(RuntimeError("CUDA error: out of memory")), Outcome.OUT_OF_MEMORY, "a note"),
        (ValueError("no MemoryError"), Outcome.CRASH, "ValueError: no MemoryError"),
        (ValueError("loss is nan"), Outcome.NON_FINITE, "ValueError: loss is nan"),
        (KeyboardInterrupt(), Outcome.CRASH, "KeyboardInterrupt"),
        (SystemExit(3), Outcome.CRASH, "SystemExit: 3"),
    ],
)
def test_each_error_has_its_outcome_and_traceback(
    error: BaseException, outcome: Outcome, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    m = answered(own("raises", error=error))

    assert (m.outcome, said in m.detail) == (outcome, True), m.detail
    assert ("GB in the process" in m.detail) is (outcome is Outcome.OUT_OF_MEMORY)
    assert 'raise axes["error"]' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("returns_no_workload", "returned a dict, not a Workload"),
        ("no_such_factory", "has no 'no_such_factory'"),
        ("not_a_function", "is of type int, not a function"),
    ],
)
def test_what_is_no_workload_is_a_crash(fake: str, said: str) -> None:
    m = answered(make_case(fake))

    assert (m.outcome, said in m.detail) == (Outcome.CRASH, True), m.detail


def test_a_training_run_that_lacks_steps_at_the_time_limit_is_a_timeout() -> None:
    m = answered(own("trains", steps=1000, bad=0), launched_at=time.monotonic() - QUICK.timeout_s)

    assert m.outcome is Outcome.TIMEOUT
    assert m.detail == "took 3 of 1,000 steps before the time limit"
    assert steps_of(m).step == (1, 2, 3)


def test_too_few_samples_at_the_time_limit_are_kept() -> None:
    m = answered(make_case("good"), launched_at=time.monotonic() - QUICK.timeout_s)

    assert (m.outcome, m.effective["samples_cut"]) == (Outcome.OK, "timeout")
    assert len(m.samples_s) == 2 < QUICK.min_samples


def test_a_timed_output_that_is_not_the_first_one_is_incorrect() -> None:
    m = answered(own("wrong_after_a_while"))

    assert (m.outcome, m.samples_s) == (Outcome.INCORRECT, ())
    assert "compared with step 0: output: error 1, bound" in m.detail


def test_steps_that_change_state_are_not_compared_and_the_digest_is_of_the_first() -> None:
    """As in training: no output comes back."""
    m = answered(own("counts_up"))

    assert (m.outcome, m.until_sampled) == (Outcome.OK, True)
    assert [d.norm for d in m.output_digest] == [1.0]


@pytest.mark.parametrize("by", ["address", "values"])
def test_a_kernel_that_keeps_its_last_output_is_found(by: str) -> None:
    """It is incorrect, or it computes in every step."""
    m = answered(own("remembers", by=by))

    if by == "address":
        assert (m.outcome, "fresh inputs" in m.detail) == (Outcome.INCORRECT, True), m.detail
    else:
        assert (m.outcome, min(m.samples_s) >= 0.01) == (Outcome.OK, True)


def test_a_clock_that_a_workload_replaces_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.monotonic
    monkeypatch.setattr(time, "perf_counter", lambda: real() / 10)
    monkeypatch.setattr(time, "monotonic", lambda: real() / 10)

    m = answered(make_case("good"), launched_at=real())

    assert min(m.samples_s) >= 0.001


def test_a_worker_without_the_gpu_of_the_run_does_not_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    m = answered(make_case("good"), device="cuda")

    assert m.outcome is Outcome.INVALID_ENVIRONMENT
    assert "cannot see one" in m.detail


def test_an_impossible_graph_is_unsupported_and_nothing_is_timed() -> None:
    m = answered(make_case("good", settings=replace(QUICK, graph=True)))

    assert (m.outcome, m.samples_s) == (Outcome.UNSUPPORTED, ())
    assert m.detail.startswith("graph: ")


def test_a_forbidden_operator_is_a_path_mismatch_without_samples() -> None:
    case = make_case("multiplies", settings=replace(QUICK, profile=True), axes={})
    rule = PathRule(must=("aten::mm",), must_not=("aten::_local_scalar_dense",))

    m = answered(replace(case, operators=rule))

    assert (m.outcome, m.samples_s) == (Outcome.PATH_MISMATCH, ())
    assert "'aten::_local_scalar_dense' ran, and 'aten::_local_scalar_dense' must" in m.detail
    assert m.profile
    assert "aten::mm" in {u.name for u in m.profile.operators}


@pytest.mark.parametrize(
    ("fake", "said", "origin"),
    [
        ("nan_at_step", "loss: 1 of 1 values are NaN or Inf, first in step 4 (counted from 0)",
         {"computation": "run", "value": "NaN", "step": 4, "precision": "float32",
          "operator": "aten.sub", "module": "Overflowing.second"}),
        ("nan_of_inputs", "", {"value": "NaN", "step": 4, "operator": "aten.log"}),
        ("nan_from_a_gradient", "first in step 3",  # found in the step before it shows
         {"value": "NaN", "step": 2, "note": "in the backward pass"}),
        ("nan_in_check", "", {"computation": "check", "value": "NaN", "precision": "bfloat16",
                              "operator": "aten.div", "step": None}),
        ("nan_past_the_dispatcher", "",  # named where it arrives
         {"step": 1, "tensor": "input 0 of aten.mul", "operator": "",
          "note": "produced outside torch's operators, or before these steps"}),
        ("inf_loss", "", {"value": "Inf", "step": 2, "operator": "aten.reciprocal"}),
        ("nan_once", "", {"value": "", "note": "not reproduced in 4 steps: it does not depend on "
                          "the case alone"}),
    ],
)  # fmt: skip
def test_nan_and_inf_are_traced_to_their_origin(
    tmp_path: Path, fake: str, said: str, origin: dict[str, object]
) -> None:
    (tmp_path / "mark").touch()

    m = answered(faulty_case(fake, axes={"path": str(tmp_path / "mark"), "bad": 4}))

    assert (m.outcome, said in m.detail) == (Outcome.NON_FINITE, True), m.detail
    (found,) = evidence_of(m).origins
    assert {name: getattr(found, name) for name in origin} == origin
    if fake == "nan_at_step":
        assert evidence_of(m).steps == 5


def test_a_training_run_takes_its_steps_and_records_each() -> None:
    m = answered(own("trains", steps=30, bad=0))

    seen = steps_of(m)
    assert m.outcome is Outcome.OK, m.detail
    assert len(m.warmup_s) + len(m.samples_s) == 30
    assert m.until_sampled is False
    assert seen.step == tuple(range(1, 31))
    assert seen.step_s == pytest.approx((*m.warmup_s, *m.samples_s))
    assert list(seen.end_s) == sorted(seen.end_s)
    assert seen.values["loss"] == tuple(map(float, range(1, 31)))
    assert seen.values["grad_norm"][:3] == (0.3333333, None, 0.3333333)
    assert seen.not_finite == {"grad_norm": (2,)}


def test_every_step_of_a_training_run_is_reported_but_very_quick_ones() -> None:
    sent: list[Any] = []
    reporter = WorkerReporter(Mock(send=sent.append))
    reporter.alive()
    for reporter.last_step in range(1, REPORTED_STEPS + 11):
        reporter.ran(0.01)
    for reporter.last_step in range(REPORTED_STEPS + 11, REPORTED_STEPS + 111):
        reporter.ran(1e-5)

    steps = [m.last_step for m in sent[1:]]
    assert steps[: REPORTED_STEPS + 10] == [*range(1, REPORTED_STEPS + 11)]
    assert len(steps) < REPORTED_STEPS + 50


def test_a_training_run_that_fails_keeps_its_steps_and_names_its_own() -> None:
    """Quick steps are not reported one by one, and the last ones are reported before the end."""
    bad = REPORTED_STEPS + 15
    m = answered(own("trains", steps=60, bad=bad))

    assert (m.outcome, evidence_of(m).steps) == (Outcome.NON_FINITE, bad)
    assert m.detail == f"loss: 1 of 1 values are NaN or Inf, first in step {bad}"
    assert steps_of(m).step == tuple(range(1, bad + 1))
