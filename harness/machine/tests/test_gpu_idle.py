"""A GPU in use is an invalid environment."""

from dataclasses import replace

import pytest

from harness.machine import gpu_idle
from harness.machine.gpu_idle import GpuUse, IdleCheck


class Meter:
    """A GPU whose use follows a script; the last reading repeats."""

    def __init__(self, *uses: GpuUse) -> None:
        self.uses = list(uses)

    def __call__(self) -> GpuUse:
        return self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]


FREE = GpuUse(used_bytes=5e8, processes={})
HELD = GpuUse(used_bytes=9e9, processes={4711: "process 4711 (python of someone), 8.50 GB"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle, "FREE_S", 0.1)
    monkeypatch.setattr(gpu_idle, "AGAIN_S", 0.05)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (FREE, FREE, ""),
        (replace(FREE, used_bytes=3e9), replace(FREE, used_bytes=3.1e9), ""),
        (FREE, replace(FREE, used_bytes=2e9), "1.5 GB of the GPU are in use"),
        (GpuUse(used_bytes=2e9), GpuUse(used_bytes=2e9), "2.0 GB of the GPU are in use"),
        (HELD, HELD, "the GPU is shared"),
        (FREE, replace(FREE, throttle_mask=0x83), "throttled at the start: power brake"),
        (GpuUse(), GpuUse(), ""),  # NVML shows nothing
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_shared_gpu_is_an_invalid_environment(before: GpuUse, now: GpuUse, said: str) -> None:
    why, _ = IdleCheck(Meter(before, now)).problem()

    assert said in why
    assert bool(said) == bool(why)


@pytest.mark.usefixtures("impatient")
def test_each_gpu_of_a_case_must_be_free_and_no_other() -> None:
    check = IdleCheck(Meter(FREE), Meter(FREE, replace(FREE, used_bytes=2e9)))

    assert check.problem() == ("", ())
    assert check.problem(2)[0].startswith("1.5 GB of the GPU of rank 1 are in use")


def test_memory_that_is_freed_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle, "POLL_S", 0.001)

    assert IdleCheck(Meter(FREE, HELD, HELD, FREE)).problem() == ("", ())
