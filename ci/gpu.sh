#!/usr/bin/env bash
# What only a GPU can show, part by part: ci/gpu.sh PART [FOLDER]. A part takes at most ten
# minutes of an H200; reports and records come under reports/, what else is made under FOLDER.
#
#   tests      every test that needs a GPU
#   attention  the operator against dense attention, peers and the floor
#   train      the 125M model
#   decode     one more token at long contexts
#   gate       five gates of a clean change, and of planted 3, 5 and 10 % slowdowns
#   bisect     a slowdown planted in this repository's own history, and found
set -euo pipefail
cd "$(dirname "$0")/.."
part="${1:-}"
folder="${2:-$(mktemp -d)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"

harness() { "$python" -m harness "$@"; }

case "$part" in
  tests)
    # The harness's alone: they measure on a GPU that no other process uses.
    failed=0
    "$python" -m pytest -q -p no:benchmark -m gpu harness || failed=1
    "$python" -m pytest -q -p no:benchmark -m gpu nsa suites -n "${WORKERS:-8}" || failed=1
    exit "$failed"
    ;;
  attention) harness run attention ;;
  train) harness run train-125m ;;
  decode) harness run decode ;;
  gate)
    "$python" -m reports.studies.gate_planted "$folder/gate"
    ;;
  bisect)
    "$python" -m reports.studies.planted_branch "$folder/bisect" --commits 40 --at 25 \
      ${REPOSITORY:+--repository "$REPOSITORY"} \
      --file nsa/ops.py --after 'need\(window_size >= 1' \
      --insert 'q[:, : q.shape[1] // 4].clone()' \
      -- attention --case 'window/triton/pass=forward' --set measure.accuracy=false \
      --set measure.warmup_s=0.5 --set measure.sample_s=0.2 --effect 0.03 --budget 5.5
    ;;
  *)
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
    ;;
esac
