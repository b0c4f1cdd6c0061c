"""Suites and kernels that ship with the harness, as data: `suites` and `nsa` are in this folder of
an installed wheel, and at the root of a checkout. Only workers of a shipped suite have them on
their path, so that a package of the same name in a user's environment or repository is not hidden.
"""
