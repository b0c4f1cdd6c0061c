"""Runs on disk: append-only JSON lines are the truth, an SQLite index can be rebuilt from them;
runs go out as JSON lines, CSV and Parquet and come in as JSON lines.
"""
