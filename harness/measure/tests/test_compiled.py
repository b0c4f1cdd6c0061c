"""Machine code of the kernels of a process: which are found, and what changes their hash."""

import struct
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.measure import compiled

PTX = """@%p1 ld.global.b32 %r1, [%rd1];
wgmma.mma_async.sync.aligned.m64n64k16 %r2;
bar.sync 0;
"""


def cubin(code: str, line: int) -> bytes:
    """An ELF file with instructions, and a line number elsewhere."""
    names, text = b"\0.names\0.text._f\0", code.encode()
    places = (1, len(names), 64), (8, len(text), 64 + len(names))
    rows = (struct.pack("<IIQQQQ", name, 1, 0, 0, at, size) for name, size, at in places)
    begin = struct.pack("<40xQ10xHHH", 64 + len(names) + len(text), 40, 2, 0)
    return begin + names + text + b"".join(rows) + str(line).encode()


class Decorated:
    """As Triton's KernelInterface: below a decorator, or a function under triton.jit."""

    def __init__(self, fn: object = None, **cubins: bytes) -> None:
        self.fn = fn
        self.device_caches = {0: ({key: kernel(code) for key, code in cubins.items()}, "more")}


class JITFunction(Decorated):
    """Its kernels are by their keys for each device."""


def kernel(code: bytes) -> Any:
    of = SimpleNamespace(shared=512, num_warps=4)
    files, resources = {"_f.ptx": "/cache/KEY/_f.ptx"}, {"n_regs": 40, "n_spills": 3}
    ttgir = f"tt.load %0 loc(#loc{len(code)})\n#loc{len(code)} = loc(unknown)"
    asm = {"ptx": PTX, "ttgir": ttgir, "cubin": code}
    return SimpleNamespace(name="_f", asm=asm, metadata=of, metadata_group=files, **resources)


def kernels(monkeypatch: pytest.MonkeyPatch, *functions: object) -> list[Any]:
    module = ModuleType("kernels_of_a_user")
    module.__dict__.update({f"f{i}": f for i, f in enumerate(functions)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    jit: Any = SimpleNamespace(JITFunction=JITFunction, KernelInterface=Decorated)
    monkeypatch.setitem(sys.modules, compiled.JIT, jit)
    return [*compiled.kernels()]


def test_a_kernel_has_its_resources_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = JITFunction(a=cubin("HGMMA.64", 7))
    (found,) = kernels(monkeypatch, twice, Decorated(twice), "no function")

    assert (found.registers, found.local_bytes, found.shared_bytes, found.warps) == (40, 12, 512, 4)
    assert (found.name, found.ir, found.mma, found.loads, found.barriers) == ("_f", "KEY", 1, 1, 1)
    monkeypatch.delitem(sys.modules, compiled.JIT)
    assert compiled.kernels() == (), "there is no Triton"


def test_lines_and_names_of_files_do_not_change_its_hash_and_an_instruction_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = JITFunction(a=cubin("HGMMA.64", 7), b=cubin("HGMMA.64", 1234))
    assert len(kernels(monkeypatch, moved)) == 1

    wider = Decorated(JITFunction(a=cubin("HGMMA.64", 7), b=cubin("HGMMA.128", 7)))
    both = kernels(monkeypatch, wider)
    assert [len(both), *map(len, {k.ttgir for k in both})] == [2, 16], "only places differ in it"


def test_a_kernel_is_known_if_it_is_compiled_here_or_a_library_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = kernels(monkeypatch, JITFunction(a=cubin("HGMMA.64", 7)))
    torch_s = ("void at::native::fill()", "void (anonymous namespace)::softmax_warp_forward<float>")
    others = ("triton_poi_0", "void mine::f()", "void (anonymous namespace)::softmax<float>()")

    assert compiled.unknown(("_f", *torch_s, *others), ours) == others
