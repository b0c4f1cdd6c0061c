"""One workload measured in a child: accuracy first, then steady state, timing, memory, counters,
profile, and the self-test of one process.
"""
