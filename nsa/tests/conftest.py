"""Where there is no GPU, kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, so it must be set before nsa.kernels is
imported, and nothing can change it afterwards in the same process.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
