"""Differences between two environments or two expansions of a suite that could move a number.

Most suspect first: the GPU before its driver, the driver before versions, the rest of the machine
last. Each difference says how it could move a number; only a measurement shows whether it does.
Pure: records in, records out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import StoreError
from harness.records import Case, Environment, Run, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs."""

    name: str
    baseline: str
    candidate: str
    how: str
    """How it could move a number."""

    def __str__(self) -> str:
        if self.baseline == self.candidate:
            return f"{self.name}: {self.baseline}; {self.how}"
        return f"{self.name}: {self.baseline} before, {self.candidate} now"


_VERSIONS = {
    "torch": "other kernels, dispatch cost and defaults",
    "triton": "the same kernel compiles to other instructions",
    "cuda": "the libraries choose other kernels",
    "cudnn": "attention and convolutions run other kernels",
    "flash-attn": "another attention kernel, or none",
    "numpy": "data preparation on the host changes speed",
    "python": "host time per step and the standard library change",
    "harness": "the measuring protocol may differ",
}
"""Most suspect first; other versions come after these."""
_SETTINGS = {
    "device": "another kind of device",
    "debug_build": "assertions in every operator",
    "launch_blocking": "every launch waits for the kernel",
    "anomaly_mode": "every backward step is checked",
    "allow_tf32_matmul": "float32 matrix products run up to eight times as fast",
    "allow_tf32_cudnn": "float32 convolutions run up to eight times as fast",
    "float32_matmul_precision": "float32 matrix products change speed",
    "deterministic": "deterministic kernels are slower",
    "flash_attention_in_torch": "attention uses another kernel",
    "allocator": "cost and fragmentation of allocations change",
    "allocator_config": "cost and fragmentation of allocations change",
    "expandable_segments": "cost and fragmentation of allocations change",
    "num_threads": "work on the CPU is spread over more or fewer threads",
    "cpu_capability": "CPU kernels use other vector instructions",
}
_PREFIXES = {
    "NSA_": "the code under test takes another route",
    "TRITON_": "kernels are compiled or cached differently",
    "CUDA_": "other devices are visible, or launches behave differently",
    "TORCH_": "torch uses other kernels or compiler passes",
    "PYTORCH_": "the allocator or the dispatcher behaves differently",
    "NCCL_": "communication takes another path",
    "OMP_": "work on the CPU is spread over more or fewer threads",
    "LD_": "other libraries are loaded",
    "PYTHONPATH": "modules are imported from elsewhere",
}
SEARCH = ("interpreter", "search path of modules", "other variables, by digest")
"""Differences between two installations or two shells; a package that moved is named itself."""
SESSION = (
    *("_", "COLUMNS", "DBUS_", "LINES", "LS_COLORS", "OLDPWD", "PS1", "PWD", "SHLVL", "SSH_"),
    *("STY", "TERM", "TMUX", "WINDOWID", "XDG_SESSION", "PYTEST_"),
    *("BUILD_", "CI_", "GITHUB_", "HOSTNAME", "KUBERNETES_", "LSB_", "PBS_", "RUNNER_", "SLURM_"),
    "HARNESS_",
)
"""Variables of a terminal, a job or the harness: none moves a number, and they are not compared."""
_SUITE = "the suite changed"
_KIND = frozenset({"measure.flush_l2", "measure.rotate_inputs", "measure.graph"})
"""Settings that change what is measured; others change how often, or for how long."""


def require_alike(before: Run, here: Environment) -> None:
    """Refuse to resume a run on another device, driver or code.

    Raises:
        StoreError: One of them differs.
    """
    baseline, git = before.environment, before.environment.git
    compared = [
        ("device", baseline.device_name, here.device_name),
        ("driver", _driver(baseline), _driver(here)),
    ]
    if git is not None and here.git is not None:  # else unknown: a note of the run names it
        compared += [
            ("commit", git.commit, here.git.commit),
            ("uncommitted changes", git.dirty_sha256 or "none", here.git.dirty_sha256 or "none"),
        ]
    for what, started, found in compared:
        if started != found:
            seen = ": see git status; what the run writes counts, too, unless git ignores it"
            why = seen if what == "uncommitted changes" else ""
            raise StoreError(
                f"run {before.run_id} started with {what} {started[:40]}, "
                f"but here it is {found[:40]}{why}",
                f"Resume it with the same {what}, or start a new one: "
                f"harness run {before.suite.path}",
            )


def _driver(environment: Environment) -> str:
    return environment.gpu.driver if environment.gpu else "none"


# --- two environments --------------------------------------------------------------------


def differences(baseline: Environment, candidate: Environment) -> Iterator[Difference]:
    """The differences of two environments that could move a number, most suspect first.

    If neither is in a git repository, the commit is among them: it is unknown.
    """
    sides = (baseline, candidate)
    gpus = [asdict(e.gpu) if e.gpu else {} for e in sides]
    yield from _one("GPU", "the chip has other limits", *(g.get("name") for g in gpus))
    for name, field, how in (
        ("GPU UUID", "uuid", "cards of one model differ by some per cent, up to a tenth"),
        ("GPU memory", "memory_bytes", "ECC, a slice of the card, or another variant of it"),
        ("driver", "driver", "it does launches, clocks and the compilation of PTX"),
        ("CUDA of the driver", "cuda_driver", "it does launches and the compilation of PTX"),
        ("power limit (W)", "power_limit_w", "the clock falls when the card reaches its limit"),
        ("highest SM clock (Hz)", "max_sm_clock_hz", "the clock bounds every kernel"),
    ):
        if all(gpus):
            yield from _one(name, how, *(g[field] for g in gpus))
    # A package that only one suite requires was not looked for by the other run.
    named = _VERSIONS.keys() | (baseline.versions.keys() & candidate.versions.keys())
    versions = ({n: v for n, v in e.versions.items() if n in named} for e in sides)
    yield from _mapped(_VERSIONS, "other code runs below the model", *versions)
    yield from _mapped(_SETTINGS, "torch behaves differently", *(e.torch_settings for e in sides))
    variables = {*baseline.variables, *candidate.variables}
    for name in sorted(v for v in variables if all(v.startswith(e.prefixes) for e in sides)):
        how = next((h for p, h in _PREFIXES.items() if name.startswith(p)), "a switch is set")
        yield from _one(name, how, *(e.variables.get(name) for e in sides))
    yield from _search(baseline, candidate)
    gits = [asdict(e.git) if e.git else {} for e in sides]
    if not any(gits):
        how = "the code may differ: it is not in a git repository"
        yield Difference(name="commit", baseline="not known", candidate="not known", how=how)
    for name, field, how in (
        ("commit", "commit", "the code under test differs"),
        ("uncommitted changes", "dirty_sha256", "the code under test differs from its commit"),
    ):
        yield from _one(name, how, *(g.get(field, "")[:10] or None for g in gits))
    for name in sorted({*baseline.data, *candidate.data}):
        how = "the data differs: lengths, loading time and loss change"
        yield from _one(f"data {name}", how, *(e.data.get(name) for e in sides))
    for name, field, how in (
        ("CPU", "cpu", "launches and data loading follow the speed of one core"),
        ("CPU count", "cpu_count", "loaders and compilers share the cores"),
        ("host memory", "memory_bytes", "the file cache has another size"),
        ("operating system", "os", "the cost of scheduling and system calls changes"),
        ("host", "hostname", "other cooling, other neighbours, another PCIe slot"),
    ):
        yield from _one(name, how, *(getattr(e, field) for e in sides))


def _search(*sides: Environment) -> Iterator[Difference]:
    """What decides which code is imported. Unknown where a run did not record it."""
    if all(e.path for e in sides):
        for name in sorted(sides[0].packages.keys() & sides[1].packages.keys()):
            places = [e.packages[name] for e in sides]
            if not all(place.startswith("{repository}") for place in places):
                yield from _one(f"package {name}", "other code is imported", *places)
        how = "a package may be imported from elsewhere"
        yield from _one(SEARCH[0], how, *(e.interpreter for e in sides))
        yield from _one(SEARCH[1], how, *(", ".join(e.path) for e in sides))
        others = [e.other_variables for e in sides]
        names = {n for side in others for n in side if not n.startswith(SESSION)}
        unlike = sorted(n for n in names if others[0].get(n) != others[1].get(n))
        words = [", ".join(f"{n} {side.get(n, 'not set')}" for n in unlike) for side in others]
        yield from _one(SEARCH[2], "the code under test may read them", *words)


def _mapped(
    known: Mapping[str, str], otherwise: str, *sides: Mapping[str, Any]
) -> Iterator[Difference]:
    """The differences of two mappings, in the order of `known`, then by name."""
    names = {name for side in sides for name in side}
    for name in (*known, *sorted(names - known.keys())):
        yield from _one(name, known.get(name, otherwise), *(side.get(name) for side in sides))


def _one(name: str, how: str, *sides: Any) -> Iterator[Difference]:
    baseline, candidate = sides
    if baseline != candidate:
        yield Difference(name=name, baseline=_word(baseline), candidate=_word(candidate), how=how)


# --- two expansions of a suite -----------------------------------------------------------


def changed(baseline: Case, candidate: Case) -> Mapping[str, tuple[Any, Any]]:
    """What differs between two cases: factory or program, axes, variables and settings."""
    flat = [_flat(case) for case in (baseline, candidate)]
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in {**flat[0], **flat[1]}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def measured(baseline: Case, candidate: Case) -> Mapping[str, tuple[Any, Any]]:
    """The part of `changed` that changes what is measured, not only how often."""
    found = changed(baseline, candidate)
    return {
        name: pair
        for name, pair in found.items()
        if not name.startswith("measure.") or name in _KIND
    }


def configuration(baseline: Suite, candidate: Suite) -> Iterator[Difference]:
    """What differs between the cases of two expansions of a suite; equal changes are one."""
    before = {c.case_id: c for c in baseline.cases}
    after = {c.case_id: c for c in candidate.cases}
    if gone := [i for i in before if i not in after]:
        yield Difference(name="cases", baseline=_few(gone), candidate="none", how=_SUITE)
    if new := [i for i in after if i not in before]:
        yield Difference(name="cases", baseline="none", candidate=_few(new), how=_SUITE)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for case_id in before.keys() & after.keys():
        for name, (a, b) in changed(before[case_id], after[case_id]).items():
            alike.setdefault((name, _word(a), _word(b)), []).append(case_id)
    for (name, one, other), case_ids in sorted(alike.items()):
        where = _few(sorted(case_ids)) if len(case_ids) < len(before) else "all cases"
        yield Difference(name=f"{name} of {where}", baseline=one, candidate=other, how=_SUITE)


def _flat(case: Case) -> dict[str, Any]:
    how = asdict(case.program) if case.program else {}  # the command, and how its output is read
    return {
        "factory": case.factory,
        **({"command": " ".join(how.pop("argv"))} if how else {}),
        **{f"program.{n}": v for n, v in how.items() if n not in ("carried", "gpus", "work_axes")},
        **{f"axis {name}": value for name, value in case.axes.items()},
        **{f"variable {name}": value for name, value in case.env.items()},
        **{f"measure.{name}": value for name, value in asdict(case.settings).items()},
    }


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _word(value: object) -> str:
    return "none" if value is None else "empty" if value == "" else str(value)
