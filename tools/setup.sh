#!/usr/bin/env bash
# Makes .venv (if there is none) with shardio and what its tests need, under the pinned constraints.
# Needs Python 3.10 or newer, named by $PYTHON if it is not python3, and a package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

installed=.venv/installed-from
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [[ ! -x .venv/bin/python ]]; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit("shardio needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
  "${PYTHON:-python3}" -m venv .venv
fi
if [[ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]]; then
  echo "setting up .venv (once; torch is large)"
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
  "${install[@]}" torch
  "${install[@]}" --editable '.[dev]'
  echo "$wanted" >"$installed"
fi
