"""Connects other tools: verdicts as JUnit, step summaries, comments and annotations, suites as
benchmarks of pytest, and the first gate of another repository.
"""
