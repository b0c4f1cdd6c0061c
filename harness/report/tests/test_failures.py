"""The section on failures, and the largest size that would have fitted."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from harness.analysis import summary
from harness.analysis.capacity import capacities
from harness.records import (
    Evidence,
    EvidenceFile,
    Measurement,
    NonFiniteOrigin,
    Outcome,
    Run,
    Telemetry,
)
from harness.report.failures import failures
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed

GB = 10**9


def over_seq_len(peaks_gb: Mapping[int, float | None], *, gpu: bool = True) -> Run:
    """A sweep with these peaks of memory; None is a case that ran out of it."""
    cases = sweep(seq_len=list(peaks_gb), gc=["off", "on"])

    def measure(c: object) -> list[Measurement]:
        length = int(c.axes["seq_len"])  # type: ignore[attr-defined]
        peak = peaks_gb[length]
        if c.axes["gc"] == "on":  # type: ignore[attr-defined]
            return timed(c, 0.1, peak_memory_bytes=GB)  # type: ignore[arg-type]
        if peak is None:
            return ended(c, Outcome.OUT_OF_MEMORY)  # type: ignore[arg-type]
        return timed(c, 0.1, peak_memory_bytes=int(peak * GB))  # type: ignore[arg-type]

    card = replace(H200, memory_bytes=140 * GB)
    return run(cases, measure, env=environment(gpu=card))


@pytest.mark.parametrize(
    ("peaks_gb", "largest"),
    [
        pytest.param({1024: 12.0, 2048: 22.0, 65536: None}, 14131, id="a line through two"),
        pytest.param(
            {1024: 2 + 1.0, 2048: 2 + 4.0, 4096: 2 + 16.0, 65536: None}, 12029, id="a square"
        ),
    ],
)
def test_the_largest_size_that_would_fit_is_estimated(
    peaks_gb: Mapping[int, float | None], largest: int
) -> None:
    (found,) = capacities(over_seq_len(peaks_gb))

    assert found.axis == "seq_len"
    assert found.largest == pytest.approx(largest, abs=2)
    assert "estimated from" in str(found)


@pytest.mark.parametrize(
    ("peaks_gb", "why"),
    [
        ({65536: None}, "no smaller case that is equal in all but one size fitted"),
        ({1024: 12.0, 65536: None}, "one smaller case is too few for an estimate"),
        ({1024: 12.0, 2048: 12.1, 65536: None}, "no smaller case that is equal"),
        ({1024: 12.0, 2048: 22.0, 4096: None}, "seq_len=4096 would have fitted: fragmentation"),
    ],
)
def test_too_few_smaller_cases_give_no_estimate(
    peaks_gb: Mapping[int, float | None], why: str
) -> None:
    (found,) = capacities(over_seq_len(peaks_gb))

    assert found.largest is None
    assert why in str(found)


def test_without_any_case_that_fitted_there_is_no_estimate() -> None:
    cases = [*sweep(seq_len=[1024, 2048]), *sweep(provider="dense", seq_len=[1024])]

    def measure(c: object) -> list[Measurement]:
        if c.provider == "dense":  # type: ignore[attr-defined]
            return timed(c, 0.1)  # type: ignore[arg-type]
        return ended(c, Outcome.OUT_OF_MEMORY)  # type: ignore[arg-type]

    found = capacities(run(cases, measure))

    assert [str(c) for c in found] == ["no other case of this sweep fitted"] * 2


def test_without_a_gpu_the_resident_memory_is_extrapolated() -> None:
    cases = sweep(seq_len=[1000, 2000, 100_000])

    def measure(c: object) -> list[Measurement]:
        length = int(c.axes["seq_len"])  # type: ignore[attr-defined]
        if length == 100_000:
            return ended(c, Outcome.OUT_OF_MEMORY)  # type: ignore[arg-type]
        rss = Telemetry(t_s=(0.1, 0.2), channels={"rss_bytes": (None, length * 1e6)})
        return [
            replace(m, telemetry=rss, peak_memory_bytes=None)
            for m in timed(c, 0.1)  # type: ignore[arg-type]
        ]

    here = environment(gpu=None, memory_bytes=16 * GB)

    (found,) = capacities(run(cases, measure, env=here))

    assert found.largest == pytest.approx(16_000, abs=2)


def test_a_failure_shows_its_facts_its_files_and_its_command() -> None:
    (case,) = sweep(seq_len=[512])
    seen = Evidence(
        runs=5,
        silent_s=30.2,
        stall_limit_s=30.0,
        last_kernel="unknown; the GPU was busy for 100% of the last 5 s: a kernel does not end",
        files=(
            EvidenceFile(name="python stacks", path="evidence/x.0/python-stacks.txt"),
            EvidenceFile(name="native stacks", note="py-spy is not installed"),
            EvidenceFile(name="reproduce", path="evidence/x.0/reproduce.py"),
        ),
    )
    recorded = run([case], lambda c: ended(c, Outcome.HANG, detail="stuck", evidence=seen))

    (found,) = failures(summary.summarise(recorded), recorded)

    assert (found.outcome, found.detail) == ("hang", "stuck")
    assert found.facts[0] == "silent for 30.2 s (limit 30.0 s); at least 5 steps finished"
    assert "a kernel does not end" in found.facts[1]
    assert found.files.startswith("`python-stacks.txt`, no native stacks (py-spy is not installed)")
    assert "log `logs/" in found.files
    assert found.command == f"python {recorded.folder}/evidence/x.0/reproduce.py"


def test_the_origin_of_a_nan_is_named_for_each_computation() -> None:
    (case,) = sweep(seq_len=[512])
    origins = (
        NonFiniteOrigin(
            computation="check",
            precision="bfloat16",
            value="NaN",
            tensor="output 0 of aten.div",
            operator="aten.div",
            module="layers.3 (Block)",
        ),
        NonFiniteOrigin(computation="reference", precision="float64"),
        NonFiniteOrigin(computation="eager", precision="", note="not looked at: 60 s were over"),
    )
    recorded = run(
        [case], lambda c: ended(c, Outcome.NON_FINITE, evidence=Evidence(origins=origins))
    )

    (found,) = failures(summary.summarise(recorded), recorded)

    assert found.facts == (
        "check (bfloat16): first NaN in output 0 of aten.div, in layers.3 (Block)",
        "reference (float64): finite",
        "eager: not looked at: 60 s were over",
    )


def test_a_failure_without_evidence_has_its_log() -> None:
    (case,) = sweep(seq_len=[512])
    recorded = run([case], lambda c: ended(c, Outcome.CRASH, detail="killed by SIGSEGV"))

    (found,) = failures(summary.summarise(recorded), recorded)

    assert (found.facts, found.command) == ((), "")
    assert found.files.startswith("log `logs/")
