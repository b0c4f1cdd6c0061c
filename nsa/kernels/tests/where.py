"""Where tests call kernels, and with which shapes.

On the CPU the kernels run in Triton's interpreter, in float16; on a GPU in both half precisions.
"""

from typing import get_args

import pytest
import torch

from nsa.kernels.common.device import Architecture
from nsa.tests.operator_inputs import needs_gpu

CALLS_KERNELS = [
    pytest.mark.usefixtures("poisoned_outputs"),
    # Triton's interpreter, of a loop whose bounds are runtime values; an error from NumPy 2.4 on.
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    ),
]
"""Marks of a module that calls kernels."""
TRITON = [
    pytest.param("cpu", torch.float16, id="interpreter"),
    *(
        pytest.param("cuda", dtype, marks=[pytest.mark.gpu, needs_gpu], id=f"gpu-{name}")
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    ),
]
"""Where the kernels run, and in which precision."""
SHAPES = [
    pytest.param({"HQ": 2, "HKV": 2, "Dk": 16, "Dv": 32}, id="group-of-1-and-wider-values"),
    pytest.param({"HQ": 6, "HKV": 2, "Dk": 20, "Dv": 12}, id="group-of-3-and-odd-head-sizes"),
    pytest.param({"HQ": 12, "HKV": 2, "Dk": 48, "Dv": 16, "B": 1}, id="group-of-6-and-two-blocks"),
    pytest.param({"HQ": 16, "HKV": 1, "Dk": 16, "Dv": 16, "B": 1}, id="group-of-16-and-one-head"),
]
BY_POINTERS = ("group-of-3-and-odd-head-sizes", "group-of-6-and-two-blocks")
"""Shapes that the interpreter computes by pointers too: other paths of a tile's mask."""
ARCHITECTURES_AND_SHAPES = [
    pytest.param(
        arch, *shape.values, *where.values, marks=where.marks, id=f"{arch}-{shape.id}-{where.id}"
    )
    for where in TRITON
    for shape in SHAPES
    for arch in get_args(Architecture)
    if where.values[0] == "cuda" or arch == "sm_90" or shape.id in BY_POINTERS
]
LENGTHS = [1, 7, 8, 22, 63]
FLOAT32_ROUNDING = 1e-6
