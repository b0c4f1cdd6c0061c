"""Runs on disk: append-only JSON lines. In: measurements, one at a time. Out: runs, also as pandas
frames.
"""
