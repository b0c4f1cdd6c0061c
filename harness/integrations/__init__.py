"""Connects other tools: verdicts of gates as JUnit, summaries, comments and annotations, suites
as benchmarks of pytest, the first gate of another repository.
"""
