"""Every kernel compiles for both architectures, fits its shared memory, and stays in registers."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from nsa.kernels.common import Architecture
from nsa.tests import aot
from nsa.tests.aot_cases import CASES

SPILLED_BYTES = 160
"""Local memory that a thread may use: some addresses set aside around a loop, not a tile."""
KNOWN_SPILLS: Mapping[tuple[str, Architecture], int] = {
    ("_transpose_kernel", "sm_80"): 256,  # by Triton 3.7 alone
    ("_transpose_kernel", "sm_90"): 272,
    # Without bulk copies, sm_80 computes the address of every row of a tile, in 64 bits.
    ("_forward_kernel", "sm_80"): 608,
    ("_query_kernel", "sm_80"): 3352,
    ("_key_kernel", "sm_80"): 3712,
    ("_score_kernel", "sm_80"): 2200,
}
"""(kernel, architecture) -> most bytes of one that is not tuned so far. Only ever made smaller."""
KNOWN_REPEATS = {
    # dK and dV are in float32 where rows are many enough to split, as T decides; and as below.
    "_key_kernel": 2,
    # In a batch, the distance between sequences is a multiple of 16 elements or it is not.
    "_transpose_kernel": 2,  # of lse or delta, and of gates
    "_score_kernel": 1,
}
"""Kernel -> how often it may be compiled again for one shape as T varies, and why."""


@pytest.fixture(scope="module")
def answers() -> Mapping[Architecture, dict[str, Any]]:
    return aot.run()


@pytest.fixture(scope="module")
def kernels(answers: Mapping[Architecture, dict[str, Any]]) -> list[aot.Compiled]:
    return [aot.Compiled(**row) for answer in answers.values() for row in answer["kernels"]]


@pytest.mark.slow
def test_every_kernel_compiles(answers: Mapping[Architecture, dict[str, Any]]) -> None:
    assert {arch: answer["errors"] for arch, answer in answers.items() if answer["errors"]} == {}
    for answer in answers.values():
        launched = {case for row in answer["kernels"] for case in row["cases"]}
        assert launched == {case.name for case in CASES}


@pytest.mark.slow
def test_a_sweep_over_lengths_compiles_once(
    answers: Mapping[Architecture, dict[str, Any]],
) -> None:
    """Else the sweep times the compiler; the last length has strides past 2**31."""
    repeated = {
        (arch, case, shape, kernel): lengths
        for arch, answer in answers.items()
        for case, shape, kernel, lengths in answer["again"]
    }

    excess = {k: T for k, T in repeated.items() if len(T) > KNOWN_REPEATS.get(k[-1], 0)}
    assert excess == {}
    assert set(KNOWN_REPEATS) <= {k[-1] for k in repeated}


@pytest.mark.slow
def test_shared_memory_fits(kernels: list[aot.Compiled]) -> None:
    assert [k for k in kernels if k.shared_bytes > aot.SHARED_BYTES[k.arch]] == []


@pytest.mark.slow
def test_registers_hold_what_a_thread_computes(kernels: list[aot.Compiled]) -> None:
    worst: dict[tuple[str, Architecture], int] = defaultdict(int)
    for k in kernels:
        worst[k.kernel, k.arch] = max(worst[k.kernel, k.arch], k.local_bytes)

    assert {k: size for k, size in worst.items() if size > KNOWN_SPILLS.get(k, SPILLED_BYTES)} == {}


@pytest.mark.slow
def test_products_reach_the_tensor_cores_of_sm_90(kernels: list[aot.Compiled]) -> None:
    """Kernels bound by their products, at the shapes that people train."""
    missed = [
        k
        for k in kernels
        if k.arch == "sm_90"
        and k.kernel in aot.WGMMA
        and k.shape not in ("small", "tiny")
        and not k.wgmma
    ]

    assert missed == []
