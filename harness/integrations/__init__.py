"""Connects other tools: verdicts as JUnit, step summaries, comments and annotations, suites as
pytest tests, runs from and for pytest-benchmark, and the first gate of another repository.
"""
