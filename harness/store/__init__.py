"""Runs on disk. In: measurements, one at a time. Out: runs, lists and histories of runs, and tables
(pandas, CSV, Parquet). The append-only JSON lines are the truth; the summary beside each can be
deleted.
"""
