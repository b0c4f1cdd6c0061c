"""Records in, records out, nothing read or written: statistics, summaries, scaling, effects,
comparisons, and a suite's verdict.
"""
