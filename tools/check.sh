#!/usr/bin/env bash
# Lint, format, types, tests: the same that runs on every change. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/pytest --numprocesses 2 "$@"
