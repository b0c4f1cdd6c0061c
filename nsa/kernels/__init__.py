"""Triton kernels: route `triton` of every part of the operator.

Tensors are [B, T, H, D]. G = HQ / HKV query heads share a KV head, and tiles flatten them: row r
of a tile is head r % G of query r // G, so no group size is padded and each key that a tile reads
serves all its heads. Softmax works in base 2; `lse` is in log2 units. Sequence lengths are
runtime values everywhere: a sweep over T compiles once.
"""
