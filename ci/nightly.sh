#!/usr/bin/env bash
# What the nightly workflows run on the GPU runner.
#
#   ci/nightly.sh code SUBJECT       the newest commit of code; nothing if a commit SUBJECT names it
#   ci/nightly.sh measure SUITE...   each suite, its report, and all reports again with their list; with BUDGET, a suite
#                                    takes so many minutes. `operators` gets the packages of suites/operators.
#   ci/nightly.sh creep              the gate of the last tag against HEAD, for slowdowns that are small in each change; 10 if it
#                                    is red. Nothing without a tag, or with BUDGET: by week.
set -euo pipefail
cd "$(dirname "$0")/.."

code() {
  local found
  found=$(git log -1 --format=%H -- . ':!reports' ':!*.md')
  # On all branches: a request that is still open counts.
  [ -n "$(git log -1 --format=%H --all --fixed-strings --grep="$1 $found")" ] || echo "$found"
}

measure() {
  local suite status peers
  for suite in "$@"; do
    status=0
    if [ "$suite" = operators ]; then
      peers=$(suites/operators/install.sh "$(mktemp -d)")
      export PYTHONPATH="$peers${PYTHONPATH:+:$PYTHONPATH}"
    fi
    harness run "$suite" --wait-for-gpu=3600 ${BUDGET:+"--budget=$BUDGET"} || status=$?
    case "$status" in
      0 | 1 | 3) ;; # 1 and 3 are verdicts, which the reports state
      *)
        echo "harness run $suite ended with exit status $status; nothing is published" >&2
        exit "$status"
        ;;
    esac
  done
  harness report --all
}

creep() {
  local tag
  [ -z "${BUDGET:-}" ] || return 0
  tag=$(git describe --tags --abbrev=0) || return 0 # git says that there is none
  harness gate --base "$tag" --head HEAD --measure --ci --wait-for-gpu=3600 --store "$(mktemp -d)" || exit 10
}

"$@"
