"""A user's program, run unchanged by a worker, in one process or in ranks. A Case with a `command`
comes in; a Measurement goes out, made from the program's output: steps and their times, metrics
that it reports, and, from one more start with a hook, counters, profile, and which variables and
options it reads.
"""
