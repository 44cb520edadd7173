#!/usr/bin/env bash
# Runs the tests with each package at the lowest version that pyproject.toml allows, in a fresh clone of the last commit:
#   bash tools/lowest_versions.sh
# Needs the program uv.
# On Linux, this installs torch with CUDA, a download of several GB.
# PYTHON sets the Python to use, and PYTEST_ARGS are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-lowest.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # Some tests run as another user.
git clone --quiet . "$work/checkout"
cd "$work/checkout"
uv venv --quiet --python "${PYTHON:-python3}" .venv
uv pip install --quiet --resolution lowest-direct --editable '.[dev]'
.venv/bin/python -m pytest --numprocesses 2 --dist worksteal -p no:cacheprovider ${PYTEST_ARGS:-} tests
