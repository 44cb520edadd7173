#!/usr/bin/env bash
# Checks lint, format and types, and runs the tests.
# With --all as the first argument, also runs the slow tests, as CI does.
# Passes other arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --all ]; then
    shift
    set -- -m "" "$@"
fi

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/clang-format --dry-run -Werror shardio/kernel/*.[ch] tools/*.c
.venv/bin/mypy
# Without bytecode files, each of the hundreds of processes that the tests start would compile the package again.
unset PYTHONDONTWRITEBYTECODE
# Several test processes share the processors, so each uses one thread. Many tests wait for other processes, so four
# processes take less time than two on two processors.
export OMP_NUM_THREADS=1
# A test that hangs fails, and its output shows where each thread stood.
exec .venv/bin/pytest --numprocesses 4 --dist worksteal --timeout 300 --durations 20 --durations-min 3 "$@"
