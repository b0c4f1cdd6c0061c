"""Every kernel compiles for both architectures, fits its shared memory, and stays in registers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nsa.kernels.common.device import Architecture
from nsa.kernels.tests import aot
from nsa.kernels.tests.aot_cases import CASES
from nsa.kernels.tests.pipelines import overwritten

SPILLED_BYTES: Mapping[Architecture, int] = {"sm_80": 72, "sm_90": 104}
"""Local memory that a thread may use: some addresses set aside around a loop, not a tile. Only ever
made smaller; the largest are `_backward_kernel`, whose loop is pipelined by hand, and `_key_kernel`
in Gluon."""


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
def test_a_sweep_over_lengths_compiles_once(answers: Mapping[Architecture, dict[str, Any]]) -> None:
    """Else the sweep times the compiler; the last length has strides past 2**31."""
    repeated = {
        (arch, case, shape, kernel): lengths
        for arch, answer in answers.items()
        for case, shape, kernel, lengths in answer["again"]
    }

    assert repeated == {}


@pytest.mark.slow
def test_shared_memory_fits(kernels: list[aot.Compiled]) -> None:
    assert [k for k in kernels if k.shared_bytes > aot.SHARED_BYTES[k.arch]] == []


@pytest.mark.slow
def test_registers_hold_what_a_thread_computes(kernels: list[aot.Compiled]) -> None:
    assert [k for k in kernels if k.local_bytes > SPILLED_BYTES[k.arch]] == []


@pytest.mark.slow
def test_tiles_of_sm_80_are_copied_16_bytes_at_a_time(kernels: list[aot.Compiled]) -> None:
    """Descriptors, which it has no engine for, become loads of single elements there."""
    banded = {"_forward_kernel", "_query_kernel", "_key_kernel", "_score_kernel"}

    copies = {
        (k.kernel, k.shape, k.constants): k.wide_copies
        for k in kernels
        if k.arch == "sm_80" and k.kernel in banded
    }

    assert {name for name, _, _ in copies} == banded
    assert [where for where, wide in copies.items() if not wide] == []


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


@pytest.mark.slow
def test_no_load_overwrites_what_a_product_reads(kernels: list[aot.Compiled]) -> None:
    """On sm_90, where products run on while the next load begins."""
    assert [k for k in kernels if k.arch == "sm_90" and k.overwritten] == []


@pytest.mark.parametrize(("wait", "found"), [("", {"%b"}), ("pendings = 0", set())])
def test_a_load_into_the_only_slot_must_wait_for_the_product(wait: str, found: set[str]) -> None:
    loop = f"""%b = ttg.local_alloc : () -> !ttg.memdesc<1x64x64xf16>
        scf.for %i {{
          %v = ttg.memdesc_index %b
          %c = ttg.async_copy_global_to_local %p, %v : memdesc
          %d = ttng.warp_group_dot %v, %v, %acc {{isAsync = true}}
          %e = ttng.warp_group_dot_wait %d {{{wait}}}
        }}"""

    assert overwritten(loop) == found


def test_a_change_of_the_machine_code_says_what_is_worse(kernels: list[aot.Compiled]) -> None:
    same, worse, edited = kernels[:3]
    spilled = replace(worse, code="other", local_bytes=worse.local_bytes + 8)
    rows = [*aot.changes(kernels[:4], [same, spilled, replace(edited, code="other")])]

    assert sorted(bad for _, bad in rows) == [False, False, True]
    assert [row.split(" | ")[0][2:] for row, bad in rows if bad] == [worse.kernel]
