"""Runs on disk. In: measurements, one at a time, or runs as JSON lines. Out: runs, lists and
histories of runs, and exports (JSON lines, CSV, Parquet). The append-only JSON lines are the truth;
the SQLite index can be rebuilt from them.
"""
