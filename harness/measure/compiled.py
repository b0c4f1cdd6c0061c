"""Machine code of the Triton and Gluon kernels that this process has compiled and loaded."""

import re
import struct
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.records import PLACES, CompiledKernel

JIT = "triton.runtime.jit"
_LIBRARY = re.compile(
    r"^(void )?((at|at_cuda_detail|c10|cub|cublasLt|cudnn|cutlass|pytorch_flash|thrust)::"
    r"|gem[mv][A-Z0-9]|cudnn_generated_|nvjet_|nccl|sm\d+_xmma_|Mem(cpy|set) |memcpy\d"
    r"|\(anonymous namespace\)::(elementwise_kernel_with_index|softmax_warp_(for|back)ward)<)"
)
"""Names of kernels of torch, cuDNN, cuBLAS and NCCL, which the code under test does not change."""

_CLASSES = {
    "mma": re.compile(r"^\s*(?:@%p\d+ )?(?:wgmma\.mma_async|mma\.sync)", re.M),
    "loads": re.compile(r"^\s*(?:@%p\d+ )?(?:ld\.global|cp\.async)", re.M),
    "barriers": re.compile(r"^\s*(?:@%p\d+ )?(?:bar\.sync|barrier\.|mbarrier\.)", re.M),
}


def kernels() -> tuple[CompiledKernel, ...]:
    """By name; of kernels that are variables of a module. Empty in Triton's interpreter."""
    jit = sys.modules.get(JIT)
    functions = {id(f): f for f in _functions(jit)} if jit else {}
    caches = (cache for f in functions.values() for cache, *_ in f.device_caches.values())
    loaded = [k for cache in caches for k in cache.values() if hasattr(k, "n_regs")]
    found = {_described(kernel) for kernel in loaded if "cubin" in kernel.asm}
    return tuple(sorted(found, key=lambda k: (k.name, k.code)))


def unknown(names: Iterable[str], known: Iterable[CompiledKernel]) -> tuple[str, ...]:
    """Those that are neither known nor a library's."""
    own = {kernel.name for kernel in known}
    return tuple(name for name in names if name not in own and not _LIBRARY.search(name))


def _functions(jit: Any) -> Iterator[Any]:
    """Each function under triton.jit, also below decorators that tune it."""
    for module in [*sys.modules.values()]:
        for value in [*getattr(module, "__dict__", {}).values()]:
            while issubclass(type(value), jit.KernelInterface):
                if issubclass(type(value), jit.JITFunction):
                    yield value
                value = getattr(value, "fn", None)


def _described(kernel: Any) -> CompiledKernel:
    texts = machine_code(kernel.asm["cubin"]), PLACES.sub("", kernel.asm["ttgir"]).encode()
    code, ttgir = (sha256(text).hexdigest()[:16] for text in texts)
    return CompiledKernel(
        name=kernel.name,
        code=code,
        ttgir=ttgir,
        registers=kernel.n_regs,
        local_bytes=4 * kernel.n_spills,
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        ir=Path(next(iter(kernel.metadata_group.values()))).parent.name,
        **{name: len(pattern.findall(kernel.asm["ptx"])) for name, pattern in _CLASSES.items()},
    )


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin, an ELF file: its `.text` sections, without line numbers."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    code = [h for h in headers if cubin.startswith(b".text", headers[names][4] + h[0])]
    return b"".join(cubin[h[4] : h[4] + h[5]] for h in code)
