"""Judges a change: a policy and two commits in, one verdict out. The candidate is compared with the
baseline commit in interleaved processes, or by exact counters. It also compares two stored runs.
"""
