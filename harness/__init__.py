"""Measures, stores, judges, explains and draws; knows no kernel by name."""

__version__ = "0.1.0"
