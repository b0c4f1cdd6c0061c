"""Attention to the selected blocks, in key-major order.

Queries, keys, values and block indices come in. `inverse` lists the queries that selected each
block, `forward` and `backward` walk those lists (`keymajor` holds what both share,
`hopper_backward` is the second in Gluon), and `combine` joins the partial results of each query.
"""
