#!/usr/bin/env bash
# Runs the tests with other versions of Python, each in a fresh clone of the last commit with its own environment:
#   bash tools/other_pythons.sh python3.10 python3.13
# On Linux, this installs torch with CUDA, a download of several GB, because shardio must also work with that build.
# The last lines of the output show the outcome for each Python.
# PYTEST_ARGS are passed to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

[[ $# -gt 0 ]] || { echo "usage: bash tools/other_pythons.sh PYTHON…" >&2; exit 2; }
work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-pythons.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # Some tests run as another user.
outcomes=() status=0
for python in "$@"; do
  checkout=$work/checkout
  rm -rf "$checkout"
  git clone --quiet . "$checkout"
  log=$work/log
  if (cd "$checkout" && PYTHON=$python bash tools/setup.sh &&
    .venv/bin/python -m pytest --numprocesses 2 --dist worksteal -p no:cacheprovider ${PYTEST_ARGS:-} tests) 2>&1 |
    tee "$log"; then
    outcome=passed
  else
    outcome=FAILED status=1
  fi
  outcomes+=("$("$python" -V): $outcome: $(tail -n 1 "$log")")
done
printf '%s\n' "${outcomes[@]}"
exit "$status"
