#!/usr/bin/env bash
# Creates .venv with shardio and the packages that its tests and its site need, at the pinned versions.
# Needs a package index and Python 3.10 or newer (python3 by default; set PYTHON to use a different one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

installed=.venv/installed-from
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [[ ! -x .venv/bin/python ]]; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit("shardio needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
  "${PYTHON:-python3}" -m venv .venv
fi
if [[ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]]; then
  echo "setting up .venv (only once; torch is a large download)"
  # Python compiles the modules that it imports. Compiling all of them here would take as long as installing them.
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt)
  "${install[@]}" torch
  # A build needs these packages. Without --no-build-isolation, pip would build with different versions.
  "${install[@]}" editables hatchling ziglang
  "${install[@]}" --no-build-isolation --editable '.[dev,docs]'
  # The tests that pack other tools' datasets need the tools, which work with newer packages than they declare:
  # mosaicml-streaming requires transformers < 5 and numpy < 2.2, and boto3 requires an older python-dateutil.
  "${install[@]}" brotli catalogue python-snappy tifffile tqdm zstd
  "${install[@]}" --no-deps boto3 botocore jmespath litdata mosaicml-streaming s3transfer
  echo "$wanted" >"$installed"
fi
