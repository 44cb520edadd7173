#!/usr/bin/env bash
# Collects wheels for a machine with a GPU and no network.
# The wheels are shardio's, with the compiled kernel, and those that tools/gpu_check.sh needs and the machine lacks.
#   bash tools/gpu_wheels.sh DIRECTORY --have FILE [--python-version 3.12]      --help lists the options
# Needs a package index and Python 3.11 or newer (python3 by default; set PYTHON to use a different one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-wheels.XXXXXX")
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work"
"$work/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt packaging
"$work/bin/python" -m tools.gpu_wheels "$@"
