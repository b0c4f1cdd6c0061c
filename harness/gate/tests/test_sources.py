"""Whether two processes run the same machine code, and which kernels differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.gate.sources import same_step
from harness.records import Breakdown, Counters, Measurement, Profile
from harness.store.ir import changed_kernels
from harness.tests import fake_runs
from harness.tests.fake_verdicts import KERNEL

WORKS = Breakdown(step_s=0.1, device_busy_s=0.098)
RAN = Profile(fingerprint="f", compiled=(KERNEL,), unknown=(), breakdown=WORKS)
COUNTED = Counters(dispatched_ops=9, steps=2)


def process(ran: Profile | None = RAN, counted: Counters = COUNTED) -> Measurement:
    (made,) = fake_runs.timed(fake_runs.case({"n": 1}), 0.1, processes=1)
    return replace(made, profile=ran, counters=counted)


@pytest.mark.parametrize(
    ("ran", "counted", "same"),
    [
        ({}, {}, True),
        ({"unknown": ("triton_poi_0",)}, {}, False),
        ({"unknown": None}, {}, False),  # an earlier record
        ({"breakdown": replace(WORKS, device_busy_s=0.02)}, {}, False),  # host-bound
        ({"no_kernels": "no GPU"}, {}, False),
        ({"fingerprint": ""}, {}, False),
        ({}, {"series": {"allocations": (1, 2)}}, False),
        ({}, {"unknown": {"host_syncs": "switched off"}}, False),
    ],
)
def test_only_what_is_known_of_a_step_is_the_same(
    ran: dict[str, Any], counted: dict[str, Any], same: bool
) -> None:
    one = process(replace(RAN, **ran), replace(COUNTED, **counted))

    assert same_step(one, one, 1.01) is same


@pytest.mark.parametrize(
    "other",
    [
        process(replace(RAN, fingerprint="g")),  # other calls
        process(replace(RAN, compiled=(replace(KERNEL, code="b"),))),
        process(counted=replace(COUNTED, dispatched_ops=10)),
        process(replace(RAN, breakdown=replace(WORKS, device_busy_s=0.1))),  # another grid
        process(None),
    ],
)
def test_a_step_that_differs_in_anything_is_another(other: Measurement) -> None:
    assert not same_step(process(), other, 1.01)


def test_a_step_that_is_slower_between_its_kernels_seldom_passes_for_the_same() -> None:
    """By 5 %, where processes scatter by 1.4 %: they are all that one pair has to tell it by."""
    ran = replace(RAN, breakdown=replace(WORKS, device_busy_s=0.099))
    passed = 0
    for seed in range(100):
        made = (
            fake_runs.timed(fake_runs.case({"n": 1}), step_s, processes=1, cv=0.014, seed=at)
            for step_s, at in ((0.1, 2 * seed), (0.105, 2 * seed + 1))
        )
        pair = [replace(m, profile=ran, counters=COUNTED) for (m,) in made]
        passed += same_step(pair[0], pair[1], 1.012)

    assert passed <= 8


def test_a_changed_kernel_is_paired_with_itself_and_a_new_one_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for key, tile in (("A", 64), ("B", 128)):
        (tmp_path / key).mkdir()
        text = f"#loc = {key}\n#mma{tile} = {tile}\n"
        text += f"  %{tile} = tt.dot %a : {tile}, #mma{tile} loc(#loc)\n"
        (tmp_path / key / "_forward.ttgir").write_text(text)
    old, new = replace(KERNEL, ir="A"), replace(KERNEL, name="_new")
    wide = replace(KERNEL, code="b", registers=255, ir="B")
    sides = [replace(RAN, compiled=of) for of in ((old,), (wide, new))]

    found = [(c.name, c.before, c.after, c.ir) for c in changed_kernels(*sides)]
    body = ("- % = tt.dot % : 64, #mma", "+ % = tt.dot % : 128, #mma")
    differ = (*body, "- #mma = 64", "+ #mma = 128")
    assert found == [("_forward", KERNEL, wide, differ), ("_new", None, new, ())]
    assert not [*changed_kernels(sides[0], None)]
    (tmp_path / "B" / "_forward.ttgir").write_bytes(b"\xff")
    assert next(changed_kernels(*sides)).ir == (), "Triton has not written all of it"
