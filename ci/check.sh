#!/usr/bin/env bash
# What CI runs on every push, and what you run before one. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

ruff format --check .
ruff check .
mypy harness nsa suites
pytest -m "not gpu" "$@"
