#!/usr/bin/env bash
# Builds a wheel, installs it into an empty environment without numba, and runs the tests of images there.
# Passes its arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

SHARDIO_KERNEL=require .venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --no-build-isolation --wheel-dir "$work" .
.venv/bin/python -m venv "$work/venv"
install=("$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
"${install[@]}" torch
"${install[@]}" "$work"/*.whl hypothesis pytest pytest-xdist webdataset matplotlib
if "$work/venv/bin/python" -c "import numba" 2>"$work/no-numba"; then
  echo "numba is installed, which this must do without" >&2
  exit 1
fi

# Copy the tests without the package, so they import the installed package.
mkdir "$work/checkout"
cp -r pyproject.toml constraints.txt README.md tests tools benchmarks examples docs "$work/checkout"
cd "$work/checkout"
export XDG_CACHE_HOME="$work/cache"
unset PYTHONDONTWRITEBYTECODE
"$work/venv/bin/python" -m pytest --numprocesses 2 --override-ini testpaths=tests -p no:cacheprovider tests/images tests/interop "$@"
