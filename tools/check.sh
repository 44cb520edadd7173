#!/usr/bin/env bash
# Runs what CI runs: lint, format, types, tests. Passes its arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/pytest --numprocesses 2 "$@"
