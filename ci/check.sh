#!/usr/bin/env bash
# What CI runs on every push, and what you run before one. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tensors in tests are tiny: a second thread only makes the first one wait for it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Hundreds of processes start in these tests, and each would compile what it imports anew.
unset PYTHONDONTWRITEBYTECODE

# What editors check suites and the policy with.
python -m harness schema > suites/suite.schema.json
python -m harness schema --gate > ci/gate.schema.json

ruff format --check .
ruff check .
mypy -n 2 harness nsa suites ci reports &
types=$!

# Counters per step against those on record, exactly. They are of the pinned torch on a CPU. One
# process at a time counts, and no count depends on what runs beside it.
torch=$(python -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])')
if grep -qx "torch==$torch" constraints.txt; then
  runs=$(mktemp -d)
  trap 'rm -rf "$runs"' EXIT
  CUDA_VISIBLE_DEVICES="" python -m harness gate --counters --store "$runs" || {
    status=$?
    [ "$status" != 4 ] || echo "Exit status 4: a defect of the harness, not a verdict." >&2
    wait "$types" || echo "The types are wrong, too." >&2
    exit "$status"
  }
else
  echo "counters not compared: those on record are of the pinned torch, and this is $torch"
fi
wait "$types"

# Kernels in the interpreter take half of the time: two processes, a file each, the long ones of
# nsa first. pytest-benchmark does not run beside others, and no test here times anything.
pytest -n 2 --dist loadfile --no-loadscope-reorder -p no:benchmark -m "not gpu" "$@"
