"""Attention operators of other projects: one file an operator, found by being in this folder.

In: the inputs and blocks of a case. Out: providers of the `attention` workload, each with what it
claims to compute, how it is installed, and why it refuses a case. `protocol.py` is the form of a
file, `found.py` the table of all. suites/README.md shows how to add one.
"""
