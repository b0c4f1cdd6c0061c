"""Counts of operators and of values that the host reads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.measure.counters import StepCount, counting


def x() -> Tensor:
    return torch.arange(6.0)


def count(run: Callable[[], object]) -> StepCount:
    with counting() as step:
        run()
    return step


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: 1 if (x > 3).any() else 0,
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 2),
    "mask as index": lambda x: x[x > 2],
    "write through a mask": lambda x: x.__setitem__(x > 2, 0.0),
    "masked_select": lambda x: x.masked_select(x > 2),
    "unique": lambda x: x.unique(),
    "repeats from a tensor": lambda x: x.repeat_interleave(torch.ones(6, dtype=torch.int64)),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x @ x + x.sum()).sqrt(),
    "where with three": lambda x: torch.where(x > 2, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "whole numbers as index": lambda x: x[torch.tensor([0, 2])],
    "repeats of known length": lambda x: x.repeat_interleave(2),
    "slices": lambda x: x[1:4].view(3, 1).expand(3, 5),
}


@pytest.mark.parametrize("name", [*READS, *FREE])
def test_a_value_read_by_the_host_is_one_sync_and_other_work_is_none(name: str) -> None:
    counted = count(lambda: {**READS, **FREE}[name](x()))

    assert counted.host_syncs == (name in READS and not torch.cuda.is_available())
    assert name in READS or counted.dispatched_ops > 0


def test_the_backward_pass_counts() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    forward = count(lambda: (weight @ weight).relu().sum())
    both = count(lambda: (weight @ weight).relu().sum().backward())

    assert forward.dispatched_ops < both.dispatched_ops
    assert both == count(lambda: (weight @ weight).relu().sum().backward())


def test_tensor_methods_are_restored_after_an_error() -> None:
    before = {**vars(Tensor)}

    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 / 0)

    assert {**vars(Tensor)} == before


def test_a_compiled_function_stays_compiled() -> None:
    """Otherwise operators would run and count that no timed step ran."""
    compiled_runs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            compiled_runs.append(1)
            return graph.forward(*args)

        return run

    double = torch.compile(lambda t: t * 2 + 1, backend=backend)
    double(x())
    compiled_runs.clear()

    count(lambda: double(x()))

    assert compiled_runs == [1]


@pytest.mark.gpu
def test_on_a_gpu_only_reads_of_its_tensors_count() -> None:
    there, here = torch.arange(6.0, device="cuda"), torch.arange(6.0)

    assert count(lambda: (there[0].item(), there.tolist(), there.cpu())).host_syncs == 3
    assert count(lambda: (here[0].item(), here.tolist(), here.cpu())).host_syncs == 0
    assert count(lambda: there + 1).device_allocations == 1
