"""A kernel with a fault: a module of its own, for Triton reads the source of what it compiles."""

import triton
import triton.language as tl


@triton.jit
def spin(x_ptr):
    """Does not end while x is 0."""
    while tl.load(x_ptr, volatile=True) == 0:
        pass
