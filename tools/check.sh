#!/usr/bin/env bash
# Lint, format, types, tests: the same that runs on every change. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# The tests start hundreds of processes, each of which would compile the package again.
unset PYTHONDONTWRITEBYTECODE
exec .venv/bin/pytest --numprocesses 2 "$@"
