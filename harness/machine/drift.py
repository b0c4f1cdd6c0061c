"""What differs between two places, or two configurations, and could move a number.

In order of suspicion: the card before its driver, the driver before the versions, and the machine
around it last. Each difference says in one phrase how it could move the number; whether it does is
for a measurement to say. Pure: records in, records out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import StoreError
from harness.records import Case, Environment, Program, Run, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was."""

    name: str
    then: str
    now: str
    how: str
    """How it could move a number."""

    def __str__(self) -> str:
        return f"{self.name}: {self.then} then, {self.now} now"


_VERSIONS = {
    "torch": "other kernels, other dispatch cost, other defaults",
    "triton": "the same kernel compiles to other instructions",
    "cuda": "the libraries choose other kernels",
    "cudnn": "attention and convolutions run other kernels",
    "flash-attn": "another attention kernel, or none",
    "numpy": "data on the host is prepared at another speed",
    "python": "the host's share of a step, and its standard library, are others",
    "harness": "another protocol may measure the same code otherwise",
}
"""In order of suspicion; a version that is not named here comes after them."""
_SETTINGS = {
    "device": "another device altogether",
    "debug_build": "assertions in every operator",
    "launch_blocking": "every launch waits for the kernel",
    "anomaly_mode": "every backward step is checked",
    "allow_tf32_matmul": "float32 products run at up to eight times the speed",
    "allow_tf32_cudnn": "float32 convolutions run at up to eight times the speed",
    "float32_matmul_precision": "float32 products run at another speed",
    "deterministic": "deterministic kernels are slower ones",
    "flash_attention_in_torch": "attention takes another kernel",
    "allocator": "allocations cost and fragment otherwise",
    "allocator_config": "allocations cost and fragment otherwise",
    "expandable_segments": "allocations cost and fragment otherwise",
    "num_threads": "work on the CPU is spread over more or fewer threads",
    "cpu_capability": "CPU kernels use other vector instructions",
}
_PREFIXES = {
    "NSA_": "the code under test takes another route",
    "TRITON_": "kernels are compiled or cached otherwise",
    "CUDA_": "other devices are seen, or launches behave otherwise",
    "TORCH_": "torch takes other kernels or other compiler passes",
    "PYTORCH_": "the allocator or the dispatcher behaves otherwise",
    "NCCL_": "communication takes another path",
    "OMP_": "work on the CPU is spread over more or fewer threads",
}
_SUITE = "another question was asked, or the same in another way"


_HOW = frozenset({"measure.flush_l2", "measure.rotate_inputs", "measure.graph"})
"""Settings that change what is measured; others change how often, or for how long."""


def differences(then: Environment, now: Environment) -> tuple[Difference, ...]:
    """All that differs between two environments and could move a number, most suspect first; the
    code too where nobody can tell, since neither time it lay in a repository."""
    return tuple(_environment(then, now))


def require_alike(before: Run, here: Environment) -> None:
    """Refuse to go on with a run where its numbers would be of two things.

    Raises:
        StoreError: The device, its driver or the code is another than the one it was begun with.
    """
    then, new = before.environment, f"start a new one with `harness run {before.suite.path}`"
    if then.device_name != here.device_name:
        raise StoreError(
            f"run {before.run_id} is of {then.device_name}, and this machine would go on with "
            f"{here.device_name}",
            f"Resume it there, or {new}.",
        )
    if _driver(then) != _driver(here):
        raise StoreError(
            f"run {before.run_id} was begun with driver {_driver(then)}, and here is "
            f"{_driver(here)}",
            f"One run has one driver: {new}.",
        )
    if then.git is None or here.git is None:
        return  # nobody knows: a note says so
    if then.git.commit != here.git.commit:
        commit = then.git.commit[:10]
        raise StoreError(
            f"run {before.run_id} was begun at commit {commit}, and here is {here.git.commit[:10]}",
            f"One run has one code: check {commit} out and resume, or {new}.",
        )
    if then.git.dirty_sha256 != here.git.dirty_sha256:
        raise StoreError(
            f"run {before.run_id} was begun with other uncommitted changes than there are here",
            f"One run has one code: put back what differs and resume, or {new}.",
        )


def _driver(environment: Environment) -> str:
    return environment.gpu.driver if environment.gpu else "none"


def configuration(then: Suite, now: Suite) -> tuple[Difference, ...]:
    """What differs between the cases of two expansions of a suite, as `changed`; alike in one."""
    return tuple(_configuration(then, now))


def changed(then: Case, now: Case) -> Mapping[str, tuple[Any, Any]]:
    """What differs between two cases: factory or program, axes, variables and settings."""
    return _changed(_flat(then), _flat(now))


def measured(then: Case, now: Case) -> Mapping[str, tuple[Any, Any]]:
    """What of that makes it another case under one id, and not the same measured more often."""
    found = changed(then, now)
    return {name: a for name, a in found.items() if not name.startswith("measure.") or name in _HOW}


def _environment(then: Environment, now: Environment) -> Iterator[Difference]:
    yield from _one(
        "GPU",
        then.gpu.name if then.gpu else None,
        now.gpu.name if now.gpu else None,
        "another chip has other limits in everything",
    )
    gpus = [asdict(e.gpu) if e.gpu else {} for e in (then, now)]
    for name, field, how in (
        ("GPU UUID", "uuid", "cards of one model differ by some per cent, up to a tenth"),
        ("GPU memory", "memory_bytes", "ECC, a slice of the card, or another variant of it"),
        ("driver", "driver", "launches, clocks and the compiler of PTX are the driver's"),
        ("CUDA of the driver", "cuda_driver", "launches and the compiler of PTX are its"),
        ("power limit (W)", "power_limit_w", "the clock falls where the card reaches its limit"),
        ("highest SM clock (Hz)", "max_sm_clock_hz", "the clock bounds every kernel"),
    ):
        if then.gpu and now.gpu:
            yield from _one(name, gpus[0][field], gpus[1][field], how)
    yield from _mapped(then.versions, now.versions, _VERSIONS, "other code runs below ours")
    yield from _mapped(
        then.torch_settings, now.torch_settings, _SETTINGS, "torch behaves otherwise"
    )
    for name in sorted({*then.variables, *now.variables}):
        how = next((h for p, h in _PREFIXES.items() if name.startswith(p)), "a switch is set")
        yield from _one(name, then.variables.get(name), now.variables.get(name), how)
    if not (then.git or now.git):
        how = "the code may be another: it lies in no git repository"
        yield Difference(name="commit", then="not known", now="not known", how=how)
    yield from _one(
        "commit",
        then.git.commit[:10] if then.git else None,
        now.git.commit[:10] if now.git else None,
        "the code under test is another",
    )
    yield from _one(
        "uncommitted changes",
        (then.git.dirty_sha256[:10] or None) if then.git else None,
        (now.git.dirty_sha256[:10] or None) if now.git else None,
        "the code under test is not what its commit says",
    )
    for name in sorted({*then.data, *now.data}):
        yield from _one(
            f"data {name}",
            then.data.get(name),
            now.data.get(name),
            "other data: other lengths, other loading time, another loss",
        )
    for name, field, how in (
        ("CPU", "cpu", "launches and data loading follow the speed of one core"),
        ("CPU count", "cpu_count", "fewer cores are shared with loaders and compilers"),
        ("host memory", "memory_bytes", "less room for caches of files"),
        ("operating system", "os", "scheduling and system calls cost otherwise"),
        ("host", "hostname", "other cooling, other neighbours, another PCIe slot"),
    ):
        yield from _one(name, getattr(then, field), getattr(now, field), how)


def _configuration(then: Suite, now: Suite) -> Iterator[Difference]:
    before = {c.case_id: c for c in then.cases}
    after = {c.case_id: c for c in now.cases}
    if gone := [i for i in before if i not in after]:
        yield Difference(name="cases", then=_few(gone), now="none", how=_SUITE)
    if new := [i for i in after if i not in before]:
        yield Difference(name="cases", then="none", now=_few(new), how=_SUITE)
    alike: dict[tuple[str, Any, Any], list[str]] = {}
    for case_id in before.keys() & after.keys():
        for name, (a, b) in _changed(_flat(before[case_id]), _flat(after[case_id])).items():
            alike.setdefault((name, _word(a), _word(b)), []).append(case_id)
    for (name, a, b), case_ids in sorted(alike.items()):
        where = _few(sorted(case_ids)) if len(case_ids) < len(before) else "all cases"
        yield Difference(name=f"{name} of {where}", then=a, now=b, how=_SUITE)


def _flat(case: Case) -> dict[str, Any]:
    return {
        "factory": case.factory,
        **({} if case.program is None else _program(case.program)),
        **{f"axis {name}": value for name, value in case.axes.items()},
        **{f"variable {name}": value for name, value in case.env.items()},
        **{f"measure.{name}": value for name, value in asdict(case.settings).items()},
    }


def _program(program: Program) -> dict[str, Any]:
    """What is run, and how it is read: a step of another pattern is another step."""
    how = {name: value for name, value in asdict(program).items() if name != "argv"}
    return {
        "command": " ".join(program.argv),
        **{f"program.{name}": value for name, value in how.items()},
    }


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (then.get(name), now.get(name)) for name in {**then, **now}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _mapped(
    then: Mapping[str, Any], now: Mapping[str, Any], known: Mapping[str, str], otherwise: str
) -> Iterator[Difference]:
    """Those of two mappings, in the order of `known`, then by name."""
    names = [*known, *sorted(({*then, *now}) - known.keys())]
    for name in names:
        yield from _one(name, then.get(name), now.get(name), known.get(name, otherwise))


def _one(name: str, then: Any, now: Any, how: str) -> Iterator[Difference]:
    if then != now:
        yield Difference(name=name, then=_word(then), now=_word(now), how=how)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _word(value: object) -> str:
    return "none" if value is None else "empty" if value == "" else str(value)
