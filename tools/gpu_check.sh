#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, in stages, each within its share of a time budget.
#   bash tools/gpu_check.sh [--wheels DIR] [--out DIR]       facts, tests and transfers, in seven minutes
#   bash tools/gpu_check.sh … --stage photographs --stage sanitizer --budget 4m          --help lists the options
# Uses .venv's Python by default; set PYTHON to use a different one.
# Downloads nothing: tools/gpu_wheels.sh collects wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "$python does not exist: create it with 'bash tools/setup.sh', or set PYTHON=python3" >&2
  exit 1
fi
exec "$python" -m tools.gpu_check "$@"
