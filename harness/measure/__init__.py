"""The parts of a measurement in a child process: accuracy, steady state, timing, memory, counters
and profile of a workload, and the self-test of clocks. In come a Workload, a Case and its settings;
out go records, which the worker joins to a Measurement.
"""
