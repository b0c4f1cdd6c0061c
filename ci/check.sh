#!/usr/bin/env bash
# What CI runs on every push, and what you run before one. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tensors in tests are tiny: a second thread only makes the first one wait for it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

ruff format --check .
ruff check .
mypy harness nsa suites
pytest -m "not gpu" "$@"
