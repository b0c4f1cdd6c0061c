"""Runs fabricated with planted speeds: what analysis, gate and report are tested on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np

from harness import records as r

H200 = r.Gpu(
    name="NVIDIA H200",
    uuid="GPU-5d1e0f4c-0000-4000-8000-000000000000",
    index=0,
    memory_bytes=150_754_820_096,
    driver="570.124.06",
    cuda_driver="12.8",
    compute_capability="9.0",
    power_limit_w=700.0,
    max_sm_clock_hz=1.98e9,
    default_power_limit_w=700.0,
)
FLOPS_PER_TOKEN = 470_000_000
"""6 N of the 78 M parameter model."""
OF_SUITE = {field.name for field in fields(r.Suite)}


def environment(*, gpu: r.Gpu | None = H200, **changes: Any) -> r.Environment:
    return r.Environment(
        **{
            "captured_at": "2026-11-21T07:30:12+00:00",
            "hostname": "node-7",
            "os": "Linux 6.8.0 x86_64",
            "cpu": "Intel Xeon Platinum 8480C",
            "cpu_count": 16,
            "memory_bytes": 256 * 2**30,
            "gpu": gpu,
            "gpu_unavailable": "" if gpu else "NVML: no NVIDIA driver is loaded",
            "versions": {"python": "3.12.7", "torch": "2.11.0+cu128", "flash-attn": None},
            "torch_settings": {"allow_tf32_matmul": True, "num_threads": 16},
            "variables": {"NSA_PREFILL_BATCHED": "1"},
            "git": r.Git(commit="406312f8" + "0" * 32, branch="main"),
            "command": ("/home/someone/.venv/bin/harness", "run", "suites/retest.yaml"),
            **changes,
        }
    )


def case(axes: Mapping[str, r.Scalar], *, workload: str = "train", provider: str = "nsa", **k: Any):
    case_id = "/".join([workload, provider, *(f"{n}={v}" for n, v in axes.items())])
    return r.Case(
        **{
            "case_id": case_id,
            "workload": workload,
            "factory": f"suites.workloads:{workload}",
            "provider": provider,
            "axes": {**axes, "precision": "bf16"},
            "swept": tuple(axes),
            **k,
        }
    )


def sweep(*, workload: str = "train", provider: str = "nsa", **axes: Sequence[r.Scalar]):
    """One case per combination of the axes' values."""
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [case(point, workload=workload, provider=provider) for point in points]


def to(**criteria: Any) -> r.Match:
    """The cases with these values."""
    return r.Match(criteria={name: (value,) for name, value in criteria.items()})


def timed(
    c: r.Case,
    step_s: float,
    *,
    processes: int = 3,
    cv: float = 0.008,
    seed: int = 0,
    tokens: int | None = None,
    telemetry: Mapping[str, float] | None = None,
    **changes: Any,
) -> list[r.Measurement]:
    """A case's ok processes: skewed samples, each process a little off the last.

    Args:
        cv: Coefficient of variation from process to process; 0.8 % was seen on an H200.
        telemetry: Channel -> level while the process is timed; a tenth of it before.
    """
    rng = np.random.default_rng([seed, *c.case_id.encode()])
    tokens = int(c.axes.get("seq_len", 512)) if tokens is None else tokens
    found = []
    for process in range(processes):
        median = step_s * rng.lognormal(sigma=cv)
        samples = median * rng.lognormal(sigma=0.01, size=20)
        ends = np.cumsum([6.7, 1.2, 0.9, 8.0, max(2.0, float(samples.sum()))])
        phases = tuple(
            r.Phase(name=name, start_s=float(start), end_s=float(end))
            for name, start, end in zip(
                ("start", "setup", "accuracy", "warmup", "sampling"),
                [0.0, *ends[:-1]],
                ends,
                strict=True,
            )
        )
        found.append(
            r.Measurement(
                **{
                    "case_id": c.case_id,
                    "process": process,
                    "outcome": r.Outcome.OK,
                    "clock": r.Clock.CUDA_EVENT,
                    "samples_s": tuple(float(s) for s in samples),
                    "steady": True,
                    "tokens": tokens,
                    "flops": tokens * FLOPS_PER_TOKEN,
                    "peak_memory_bytes": 7 * 2**30 + tokens * 2**20,
                    "effective": {**c.axes, "dim": 768, "n_layers": 12},
                    "telemetry": _telemetry(telemetry, phases, rng) if telemetry else None,
                    "phases": phases,
                    "wall_s": float(ends[-1]) + 0.4,
                    "log": f"logs/{c.case_id.replace('/', '_')}-{process}.log",
                    **changes,
                }
            )
        )
    return found


def taking(c: r.Case, *steps_s: float, **changes: Any) -> list[r.Measurement]:
    """A process with each of these step times, without scatter."""
    processes = enumerate(timed(c, 1.0, processes=len(steps_s), **changes))
    return [replace(m, samples_s=(steps_s[i],) * 20) for i, m in processes]


def trained(
    m: r.Measurement,
    *,
    steps: int = 200,
    pace: Callable[[int], float] = lambda _: 1.0,
    loss: Callable[[int], float] = lambda n: 5.5 - n / 100,
    seed: int = 0,
    every: int = 1,
    not_finite: Mapping[str, tuple[int, ...]] | None = None,
    **values: Callable[[int], float],
) -> r.Measurement:
    """With a record of its steps, of 50 ms times their pace: one row every so many. Times scatter
    by 1 %, losses by 2 %."""
    rng = np.random.default_rng(seed)
    jitter, noise = rng.normal(1, 0.01, size=steps + 1), rng.normal(1, 0.02, size=steps + 1)
    own = tuple(range(every, steps + 1, every))
    step_s = tuple(0.05 * pace(n) * float(jitter[n]) for n in own)
    seen = r.OverSteps(
        step=own,
        step_s=step_s,
        end_s=tuple(map(float, np.cumsum(step_s))),
        values={
            "loss": tuple(loss(n) * float(noise[n]) for n in own),
            **{name: tuple(float(of(n)) for n in own) for name, of in values.items()},
        },
        not_finite=not_finite or {},
    )
    return replace(m, over_steps=seen)


def late(m: r.Measurement) -> r.Measurement:
    """Without its first two steps: their lines arrived with one of the setup."""
    seen = m.over_steps
    assert seen is not None
    of = {name: getattr(seen, name)[2:] for name in ("step", "step_s", "end_s")}
    values = {name: read[2:] for name, read in seen.values.items()}
    return replace(m, over_steps=replace(seen, **of, values=values))


def ended(
    c: r.Case, outcome: r.Outcome, *, processes: int = 1, **changes: Any
) -> list[r.Measurement]:
    """A case's processes that ended without samples."""
    return [
        r.Measurement(
            **{
                "case_id": c.case_id,
                "process": process,
                "outcome": outcome,
                "detail": f"planted: {outcome}",
                "wall_s": 30.0,
                "log": f"logs/{c.case_id.replace('/', '_')}-{process}.log",
                **changes,
            }
        )
        for process in range(processes)
    ]


def run(
    cases: Sequence[r.Case],
    measure: Callable[[r.Case], list[r.Measurement]],
    *,
    env: r.Environment | None = None,
    rules: Sequence[r.Rule] = (),
    expectations: Sequence[r.Rule] = (),
    **changes: Any,
) -> r.Run:
    """A run of these cases; the changes are of its suite, or of itself."""
    suite = r.Suite(
        **{
            "name": "retest",
            "title": "A100 retest",
            "subject": "A100 Retest",
            "question": "Is training fast enough to start the 50,000-step run?",
            "path": "suites/retest.yaml",
            "text": "schema: 1\n",
            "sha256": "ab" * 32,
            "cases": tuple(cases),
            "rules": tuple(rules),
            "expectations": tuple(expectations),
            **{name: changes.pop(name) for name in OF_SUITE & changes.keys()},
        }
    )
    return r.Run(
        **{
            "run_id": "20261121-073012-retest-h200-3f2a",
            "folder": "reports/runs/20261121-073012-retest-h200-3f2a",
            "suite": suite,
            "environment": environment() if env is None else env,
            "measurements": tuple(m for c in cases for m in measure(c)),
            "started_at": "2026-11-21T07:30:12+00:00",
            "ended_at": "2026-11-21T07:44:14+00:00",
            **changes,
        }
    )


def variables() -> r.Run:
    """Three variables, of which A and B make a step fast, but only together; no rule."""

    def measure(c: r.Case) -> list[r.Measurement]:
        if c.axes["A"] == c.axes["B"] == 1:
            return timed(c, 0.95, cv=0.001, tokens=512)
        busy = r.Evidence(working=True)
        return ended(c, r.Outcome.TIMEOUT, lower_bound_s=45.0, tokens=512, evidence=busy)

    return run(sweep(A=[0, 1], B=[0, 1], C=[0, 1]), measure)


def _telemetry(
    levels: Mapping[str, float], phases: Sequence[r.Phase], rng: np.random.Generator
) -> r.Telemetry:
    t = np.arange(0.05, phases[-1].end_s, 0.1)
    timed_from = phases[3].start_s
    level = np.where(t < timed_from, 0.1, 1.0)
    return r.Telemetry(
        t_s=tuple(map(float, t)),
        channels={
            name: tuple(map(float, mean * level * rng.normal(1, 0.08, t.size).clip(0.5, 1.1)))
            for name, mean in levels.items()
        },
    )


def ratio(value: float, low: float | None, high: float | None, *both: float) -> r.Ratio:
    return r.Ratio(value=value, low=low, high=high, n=len(both) or 6, each=both)


def comparison(**changes: Any) -> r.Comparison:
    """A comparison that finds no slowdown; with these fields instead."""
    of, effect = ratio(1.001, 0.99, 1.01), 0.02
    same = r.Comparison(case_id="train/nsa", change=r.Change.SAME, ratio=of, smallest_effect=effect)
    return replace(same, **changes)
