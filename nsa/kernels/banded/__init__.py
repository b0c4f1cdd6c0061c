"""Attention in which each query sees one interval of keys: compress, window and dense.

Queries, keys, values and a `Band` come in. `forward` returns the output and the log-sum-exp;
`backward` returns the gradients, by `query` (dQ) and `key` (dK and dV), over arrays that `planes`
writes.
"""
