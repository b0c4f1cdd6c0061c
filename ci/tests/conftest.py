"""Forkservers of these tests need not import torch either."""

from harness.conftest import forked_forkservers

__all__ = ["forked_forkservers"]
