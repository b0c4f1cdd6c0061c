"""Verdicts and suites in other people's tools: pytest, pytest-benchmark, JUnit, step summaries,
annotations, comments.
"""
