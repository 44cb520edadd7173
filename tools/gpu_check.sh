#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: runs everything that needs one, in stages, each within its share of a time budget.
#   bash tools/gpu_check.sh [--wheels DIR] [--out DIR]       facts, tests and transfers, in seven minutes
#   bash tools/gpu_check.sh … --stage photographs --stage sanitizer --budget 4m          --help lists the options
# Runs with .venv's Python, or set PYTHON to another one. Downloads nothing: tools/gpu_wheels.sh collects wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "$python does not exist: create it with 'bash tools/setup.sh', or set PYTHON=python3" >&2
  exit 1
fi
exec "$python" -m tools.gpu_check "$@"
