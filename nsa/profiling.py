"""Names for the parts of the operator, and of a training step, in a profile."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._autograd import _profiler_enabled

_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """A named range in a profile; does nothing without a profiler."""
    if _profiler_enabled():
        return torch.profiler.record_function(name)
    return _NOTHING
