"""Every kernel compiled ahead of time for sm_80 and sm_90, by its own launcher, on any machine.

`python -m nsa.kernels.tests.aot` prints what each kernel takes of an SM, as Markdown; with
`--against REF` what a change since that commit does to the machine code, also for a GPU that is not
here. Exit status 1: a kernel does not compile, spills more, or fills less of an SM. The
launchers run as they are: a stand-in driver names the GPU, tensors are of torch's `meta` device
(shapes, strides and types without memory, so the shipped lengths cost nothing), and every launch
stops once its kernel is compiled. Triton's cache makes a second run quick.

One process compiles for one GPU: a kernel remembers the target that it was first compiled for,
and one defined under TRITON_INTERPRET cannot be compiled at all.
"""

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa.kernels.common import device
from nsa.kernels.common.device import Architecture
from nsa.kernels.tests.aot_cases import CASES, SHAPES, Case
from nsa.kernels.tests.pipelines import overwritten

ROOT = Path(__file__).parents[3]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
SHARED_BYTES: dict[Architecture, int] = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
"""Most shared memory that a block may have.

Source: NVIDIA, CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""
SM_BYTES: dict[Architecture, int] = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
"""Shared memory of an SM, of which each block takes 1 KiB for itself. Source: as above."""
WGMMA = {
    "_forward_kernel",
    "_query_kernel",
    "_key_kernel",
    "_score_kernel",
    "_partial_kernel",
    "_backward_kernel",
}
"""Kernels whose time goes into large matrix products."""
_BY_SHAPE = {"HKV", "HQ", "G", "D", "D1", "D2", "DV", "DV_BLOCK", "BLOCK_D", "H", "N", "N_PAD"}
"""Constants that follow from the shape; the table leaves them out."""


class StandIn:
    """A Triton driver for an absent GPU: it names the target to compile for."""

    def __init__(self, arch: Architecture) -> None:
        self._target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel with one set of constants."""

    kernel: str
    arch: Architecture
    cases: tuple[str, ...]
    """The cases that launched it."""
    shape: str
    """The first of the shapes that launched it."""
    constants: str
    warps: int
    stages: int
    shared_bytes: int
    registers: int
    """Of a thread."""
    local_bytes: int
    """Of a thread, in memory: registers that were spilled."""
    wgmma: bool
    """Whether its products run on the tensor cores of sm_90 as such."""
    overwritten: tuple[str, ...]
    """See nsa.kernels.tests.pipelines."""
    wide_copies: bool
    """Whether it copies into shared memory 16 bytes at a time, asynchronously (cp.async.cg)."""
    code: str = ""
    """Hash of its instructions (SASS)."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kernel, self.shape, self.arch, re.sub(r" ?BLOCK_\w+=\d+", "", self.constants)

    @property
    def uses(self) -> tuple[str, ...]:
        """Registers, spilled bytes, shared KiB and share of an SM, for the table."""
        shared = f"{self.shared_bytes / 1024:.1f}"
        return str(self.registers), str(self.local_bytes), shared, f"{self.occupancy:.0%}"

    @property
    def occupancy(self) -> float:
        """Share of an SM's 64 warps that run, by registers (256 at a time) and shared memory."""
        of_warp = -(-self.registers * 32 // 256) * 256
        blocks = 65_536 // (of_warp * self.warps)
        if self.shared_bytes:
            blocks = min(blocks, SM_BYTES[self.arch] // (self.shared_bytes + 1024))
        return min(blocks * self.warps, 64) / 64


@dataclass(slots=True)
class Launches:
    """The kernels that were launched, and by what, in order of their first launch."""

    first: dict[int, tuple[str, Any, str]] = field(default_factory=dict)
    """id of a compiled kernel -> its name, itself, and the shape."""
    cases: dict[int, list[str]] = field(default_factory=dict)
    case: str = ""
    shape: str = ""

    def add(self, name: str, compiled: Any) -> None:
        self.first.setdefault(id(compiled), (name, compiled, self.shape))
        cases = self.cases.setdefault(id(compiled), [])
        if self.case not in cases:
            cases.append(self.case)


@contextmanager
def compiling_for(arch: Architecture) -> Iterator[Launches]:
    """Turn every launch into a compilation for `arch`, for the rest of this process."""
    launches = Launches()
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        launches.add(self.fn.__name__, compiled)
        return compiled

    JITFunction.run = compile_only
    driver.set_active(StandIn(arch))
    try:
        with device.as_architecture(arch):
            yield launches
    finally:
        JITFunction.run = launch


def compile_cases(
    arch: Architecture, cases: Iterable[Case], *, every_shape: bool = False
) -> dict[str, Any]:
    """Compile what the cases launch, as data for JSON: `kernels`, `errors` and `again`.

    A case is called at its shape's own length first. `again` lists what its other lengths
    compile on top, as [case, shape, kernel, lengths]: a sweep over lengths should compile nothing.
    """
    errors: dict[str, str] = {}
    again: dict[tuple[str, str, str], list[int]] = {}
    with compiling_for(arch) as launches:
        for case in cases:
            for shape in SHAPES:
                tested = arch in shape.architectures and case.takes(shape)
                if not (every_shape or tested):
                    continue
                launches.case, launches.shape = case.name, shape.name
                try:
                    case.launch(shape, shape.T)
                    before = set(launches.first)
                    for T in case.sweep:
                        case.launch(shape, T)
                        new = [k for k in launches.first if k not in before]
                        for key in new:
                            where = (case.name, shape.name, launches.first[key][0])
                            again.setdefault(where, []).append(T)
                        before.update(new)
                except Exception:  # noqa: BLE001 - a kernel that fails must not hide the others
                    errors[f"{case.name} {shape.name}"] = traceback.format_exc(limit=-6)
    kernels = [
        asdict(_describe(name, arch, compiled, shape, launches.cases[key]))
        for key, (name, compiled, shape) in launches.first.items()
    ]
    repeats = [[*where, lengths] for where, lengths in again.items()]
    return {"kernels": kernels, "errors": errors, "again": repeats}


def _describe(
    name: str, arch: Architecture, compiled: Any, shape: str, cases: Sequence[str]
) -> Compiled:
    registers, local = _usage(compiled.asm["cubin"])
    return Compiled(
        kernel=name,
        arch=arch,
        cases=tuple(cases),
        shape=shape,
        constants=_constants(compiled),
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        local_bytes=local,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        overwritten=tuple(sorted(overwritten(compiled.asm["ttgir"]))),
        wide_copies="cp.async.cg.shared.global" in compiled.asm["ptx"],
        code=hashlib.sha256(_machine_code(compiled.asm["cubin"])).hexdigest()[:16],
    )


def _machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin, an ELF file: its `.text` sections, without line numbers."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    code = [h for h in headers if cubin.startswith(b".text", headers[names][4] + h[0])]
    return b"".join(cubin[h[4] : h[4] + h[5]] for h in code)


def _constants(compiled: Any) -> str:
    names = compiled.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in compiled.src.constants.items()}
    return " ".join(
        name if value is True else f"{name}={value}"
        for name, value in constants.items()
        if name.isupper() and name not in _BY_SHAPE and value is not False
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        printed = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", printed)
    if found is None:
        raise ValueError(f"cuobjdump prints no register counts: {printed}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def run(
    folder: Path = ROOT,
    *,
    every_shape: bool = False,
    architectures: Sequence[Architecture] = ARCHITECTURES,
) -> dict[Architecture, dict[str, Any]]:
    """Compile all cases of a working tree, each architecture in a process of its own; a
    CalledProcessError if one died. `every_shape`: also shapes that the tests leave out."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(folder)
    there: Any = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "text": True}
    shapes = ["--every-shape"] if every_shape else []
    command = [sys.executable, "-m", "nsa.kernels.tests.aot", *shapes]
    workers = {
        arch: subprocess.Popen([*command, "--worker", arch], **there) for arch in architectures
    }
    answers = {arch: worker.communicate()[0] for arch, worker in workers.items()}
    for worker in workers.values():
        if worker.returncode:
            raise subprocess.CalledProcessError(worker.returncode, worker.args)
    return {arch: json.loads(answer) for arch, answer in answers.items()}


def markdown(rows: Iterable[Compiled]) -> str:
    """The table; a row that many cases launch names them all."""
    lines = [
        "| kernel | shape | launched by | constants | arch | warps x stages "
        "| registers | spilled bytes | shared KiB | of an SM | wgmma |",
        "|:--|:--|:--|:--|:--|--:|--:|--:|--:|--:|:--|",
    ]
    lines += [
        f"| {r.kernel} | {r.shape} | {', '.join(r.cases)} | {r.constants} | {r.arch} "
        f"| {r.warps} x {r.stages} | {' | '.join(r.uses)} | {'yes' if r.wgmma else ''} |"
        for r in sorted(rows, key=lambda r: (r.kernel, r.arch, r.shape, r.constants))
    ]
    return "\n".join(lines)


def changes(before: Sequence[Compiled], after: Sequence[Compiled]) -> Iterator[tuple[str, bool]]:
    """A row of a table for each kernel that differs, and whether it spills more or fills less."""
    then, now = map(_by_key, (before, after))
    for key in sorted({*then, *now}):
        old, new = then.get(key), now.get(key)
        if old is None or new is None:
            yield f"| {' | '.join(key)} | {'new' if new else 'gone'} | | | |", False
        elif old.uses != new.uses or (old.code and old.code != new.code):
            worse = new.local_bytes > old.local_bytes or new.occupancy < old.occupancy
            ends = zip((old.constants, *old.uses), (new.constants, *new.uses), strict=True)
            cells = " | ".join(f"{a} → {b}" if a != b else a for a, b in ends)
            yield f"| {' | '.join(key[:3])} | {cells} |", worse


def _by_key(found: Sequence[Compiled]) -> dict[tuple[str, ...], Compiled]:
    """The kernels by all but the sizes of their tiles, and those that share that by these too."""
    keys = Counter(r.key for r in found)
    return {r.key if keys[r.key] == 1 else (*r.key[:3], r.constants): r for r in found}


def _rows(answers: dict[Architecture, dict[str, Any]]) -> list[Compiled]:
    return [Compiled(**row) for answer in answers.values() for row in answer["kernels"]]


def compare(ref: str, now: Sequence[Compiled]) -> bool:
    """Print what changed in the machine code since a commit; whether something is worse."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", folder, ref]).returncode:
            raise SystemExit(2)  # git has said why
        try:
            then = _rows(run(Path(folder)))
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)
    found = [*changes(then, now)]
    same = len(now) - sum("| gone |" not in row for row, _ in found)
    what = "machine code" if all(r.code for r in then) else "registers, spills and shared memory"
    print(f"{same} of {len(now)} kernels have the same {what} as at {ref}")
    if found:
        print("\n| kernel | shape | arch | constants | registers | spilled | shared KiB | SM |")
        print("|:--|:--|:--|:--|--:|--:|--:|--:|", *(row for row, _ in found), sep="\n")
    return any(worse for _, worse in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", choices=ARCHITECTURES, help="compile for one, print JSON")
    parser.add_argument("--every-shape", action="store_true", help="also untested shapes")
    parser.add_argument("--against", metavar="REF", help="only what changed since this commit")
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(compile_cases(given.worker, CASES, every_shape=given.every_shape)))
        return 0
    answers = run(every_shape=given.every_shape)
    if not given.against:
        print(markdown(_rows(answers)))
    failed = bool(given.against) and compare(given.against, _rows(answers))
    for arch, answer in answers.items():
        for where, error in answer["errors"].items():
            failed = True
            print(f"\n{arch}: {where} does not compile\n{error}", file=sys.stderr)
        for case, shape, kernel, lengths in answer["again"]:
            print(f"{arch}: {kernel} of {case}, {shape}: again at T = {lengths}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
