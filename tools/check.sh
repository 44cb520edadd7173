#!/usr/bin/env bash
# Runs what CI runs: lint, format, types, tests. Passes its arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# The tests start hundreds of processes, each of which would compile the package again.
unset PYTHONDONTWRITEBYTECODE
# Two test processes share the processors, so each computes in one thread.
export OMP_NUM_THREADS=1
exec .venv/bin/pytest --numprocesses 2 --dist worksteal --durations 20 --durations-min 3 "$@"
