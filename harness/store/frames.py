"""A stored run as pandas frames, for a notebook."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.analysis import over_steps
from harness.analysis.summary import summarise
from harness.records import COUNTERS, METRICS, CaseSummary, Measurement, Run
from harness.store import reader

_PROCESS = {"process": "Int64", "outcome": "string", "detail": "string", "clock": "string"}
_PROCESS |= {"steady": "boolean"}
_PROCESS |= dict.fromkeys(["tokens", "flops", "bytes", "peak_memory_bytes"], "Int64")
_PROCESS |= {"lower_bound_s": "float64", "wall_s": "float64"}
_SAMPLE = {"sample": "Int64"}
_SAMPLE |= dict.fromkeys(["sample_s", "host_sample_s", "sample_at_s"], "float64")
_SAMPLE |= {"discarded": "string"}
_COLUMNS = {"case_id": "string", **_PROCESS, **_SAMPLE}
_UNITS = {"_s": "s", "bytes": "B", "flops": "FLOP", "tokens": "tokens"}
"""End of a column's name -> its unit."""
_NO_STEPS = pd.DataFrame(
    {"case_id": "", "process": 0, "step": 0, "step_s": 0.0, "end_s": 0.0}, index=[]
).astype({"case_id": "string", "process": "Int64", "step": "Int64"})


def _rows(run: Run) -> Iterator[Mapping[str, object]]:
    """One a sample; a process without samples has one."""
    for m in run.measurements:
        process = {"case_id": m.case_id, **{name: getattr(m, name) for name in _PROCESS}}
        yield from ({**process, **sample} for sample in _samples(m) or ({},))


def _samples(m: Measurement) -> list[Mapping[str, object]]:
    count = len(m.samples_s)
    return [
        {
            "sample": i,
            "sample_s": sample_s,
            "host_sample_s": m.host_samples_s[i] if len(m.host_samples_s) == count else None,
            "sample_at_s": m.samples_at_s[i] if len(m.samples_at_s) == count else None,
            "discarded": " ".join(r for r, bad in m.discarded.items() if i in bad) or None,
        }
        for i, sample_s in enumerate(m.samples_s)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFrames:
    """A run as frames, one row for each thing; `frame.attrs["units"]` has units by column.

    Every frame has `run_id`, `case_id`, `workload`, `provider` and a column for each axis, called
    `axis_NAME` if the frames have another column NAME. What is unknown is missing.
    """

    run: Run
    """The whole record: suite, environment, telemetry, profiles."""
    cases: pd.DataFrame
    """A case: `outcome` (`ok`, `crash`, ..., `not run`) and its metrics (`step_s`, `tokens_per_s`,
    `peak_memory_bytes`, ...), each with its 95 % interval in `METRIC_lo` and `METRIC_hi`, which one
    process does not have."""
    processes: pd.DataFrame
    """A process: `process` (from 0), `outcome`, `detail`, `clock`, `steady`, `tokens`, `flops` and
    `bytes` of one step, `peak_memory_bytes`, `lower_bound_s`, `wall_s`."""
    samples: pd.DataFrame
    """A steady step: `process`, `sample` (from 0), `sample_s` on the clock of its process,
    `host_sample_s`, `sample_at_s` since the launch, `discarded` (why it does not count)."""
    counters: pd.DataFrame
    """A process that counted: `process`, its counts of one step (`host_syncs`, ...), and `exact`:
    whether two steps agree."""
    steps: pd.DataFrame
    """A step of a training run: `process`, `step` (its own number), `step_s`, `end_s` since the
    launch, what it reported (`loss`, ...), and the channels of the telemetry at its end."""


def load(run: str | Path, store: str | Path) -> RunFrames:
    """See harness.load."""
    whole = reader.load(Path(store), run)
    own = (r for c in whole.suite.cases if c.program for r in c.program.readings)
    units = {r.metric: r.unit for r in own} | {m.name: m.unit for m in METRICS.values()}
    units |= {name: unit for name in _COLUMNS for end, unit in _UNITS.items() if name.endswith(end)}
    summaries = summarise(whole)
    metrics = [name for name in units if any(name in s.metrics for s in summaries)]
    units |= {f"{name}_{end}": units[name] for name in metrics for end in ("lo", "hi")}
    taken = {*_COLUMNS, *units, "exact"}
    cases = pd.DataFrame(
        {
            "run_id": whole.run_id,
            **{name: getattr(s.case, name) for name in ("case_id", "workload", "provider")},
            **{f"axis_{n}" if n in taken else n: v for n, v in s.case.axes.items()},
        }
        for s in summaries
    ).convert_dtypes()
    rows = pd.DataFrame(_rows(whole), columns=[*_COLUMNS]).astype(_COLUMNS)
    counts = [
        (m.case_id, m.process, *(getattr(m.counters, n) for n in (*COUNTERS, "exact")))
        for m in whole.measurements
        if m.counters
    ]
    counted = pd.DataFrame(counts, columns=["case_id", "process", *COUNTERS, "exact"])
    counted = counted.astype({"case_id": "string", **dict.fromkeys(counted.columns[1:-1], "Int64")})
    summed = pd.DataFrame(_summed(s, metrics) for s in summaries)

    def framed(frame: pd.DataFrame) -> pd.DataFrame:
        joined = cases.merge(frame, on="case_id")
        joined.attrs["units"] = {name: units[name] for name in frame.columns if name in units}
        return joined

    processes = rows[rows["sample"].fillna(0) == 0]
    return RunFrames(
        run=whole,
        cases=framed(summed.astype({"case_id": "string", "outcome": "string"})),
        processes=framed(processes[["case_id", *_PROCESS]]),
        samples=framed(rows.dropna(subset="sample")[["case_id", "process", *_SAMPLE]]),
        counters=framed(counted),
        steps=framed(pd.concat([_NO_STEPS, *map(_steps, whole.measurements)])),
    )


def _steps(m: Measurement) -> pd.DataFrame:
    s = m.over_steps
    if s is None:
        return _NO_STEPS
    channels = m.telemetry.channels if m.telemetry else ()
    own = {"case_id": m.case_id, "process": m.process, "step": s.step, "step_s": s.step_s}
    read = {name: of for name in channels if len(of := over_steps.at_steps(m, name))}
    return pd.DataFrame({**own, "end_s": s.end_s, **read, **s.values}).astype(_NO_STEPS.dtypes)


def _summed(s: CaseSummary, metrics: Sequence[str]) -> dict[str, object]:
    row: dict[str, object] = {"case_id": s.case.case_id, "outcome": str(s.outcome or "not run")}
    for name in metrics:
        e = s.metrics.get(name)
        ends = (e.value, e.low, e.high) if e else (None, None, None)
        found = (math.nan if end is None else end for end in ends)
        row |= zip((name, f"{name}_lo", f"{name}_hi"), found, strict=True)
    return row
