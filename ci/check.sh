#!/usr/bin/env bash
# What CI runs on every push, and what you run before one. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tensors in tests are tiny: a second thread only makes the first one wait for it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

ruff format --check .
ruff check .
mypy harness nsa suites
# Kernels in the interpreter take half of the time: two processes, a file each. pytest-benchmark
# does not run beside others, and no test here times anything.
pytest -n 2 --dist loadfile -p no:benchmark -m "not gpu" "$@"
