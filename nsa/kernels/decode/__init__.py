"""The whole operator for one new query per sequence, in four launches.

Queries, caches and lengths come in; the output and the selected blocks go out. `attend` starts the
launches, whose kernels are in `pieces`, `scores` and `merge`.
"""
