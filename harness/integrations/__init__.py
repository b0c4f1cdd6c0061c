"""Connects other tools: verdicts as JUnit, step summaries, comments and annotations, suites as
pytest tests, and runs from and for pytest-benchmark.
"""
