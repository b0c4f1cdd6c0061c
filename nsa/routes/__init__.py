"""Routes of the operator without Triton, each a way to compute one part.

A route takes validated tensors and positions from `nsa.ops` and returns what `nsa.reference`
defines, or raises `Unsupported` with the reason. `eager` and `selected` run on any device, `fa2`
and `dense` call attention kernels of other libraries, and `decode` takes one query per sequence
through whichever route was named.
"""
