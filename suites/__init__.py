"""Suites (YAML) and the workloads they name."""
