"""Pure functions from records to records: no files, no processes, no torch.

In come stored runs and their suites. Out come summaries of cases with intervals, scaling fits,
effects, dead axes, causes, comparisons of a baseline and a candidate, and the verdict of a suite's
rules.
"""
