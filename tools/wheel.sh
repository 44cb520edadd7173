#!/usr/bin/env bash
# Builds the source distribution and the wheels of all platforms, and checks their metadata. Installs this machine's
# wheel into an empty environment, and runs the tests of images, other libraries and the kernel there. Passes its
# arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

.venv/bin/python tools/build_kernel.py --all # Compiles several targets at the same time.
for platform in $(.venv/bin/python -c "from shardio.kernel.targets import PLATFORMS; print(*PLATFORMS)"); do
  SHARDIO_PLATFORM=$platform .venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$work" .
done

# Package indexes refuse files whose description or metadata has errors.
.venv/bin/python -m hatchling build --target sdist --directory "$work"
.venv/bin/python -m venv "$work/twine"
"$work/twine/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt twine
"$work/twine/bin/python" -m twine check --strict "$work"/*.whl "$work"/*.tar.gz

.venv/bin/python - "$work" <<'END'
import sys
from pathlib import Path
from zipfile import ZipFile

import shardio
from shardio.kernel.targets import CAPABILITIES, PLATFORMS, list_source, name_cubin

for platform, targets in PLATFORMS.items():
    with ZipFile(Path(sys.argv[1], f"shardio_loader-{shardio.__version__}-py3-none-{platform}.whl")) as wheel:
        found = {name for name in wheel.namelist() if name.startswith("shardio/kernel/") and not name.endswith(".py")}
    root = Path(shardio.__file__).parents[1]
    cubins = map(name_cubin, CAPABILITIES) if "linux" in platform else ()
    files = [*list_source(), *(target.path for target in targets), *cubins]
    wanted = {str(path.relative_to(root)) for path in files}
    if found != wanted:
        sys.exit(f"the wheel for {platform} has the kernel files {sorted(found)}, expected {sorted(wanted)}")
END

.venv/bin/python -m venv "$work/venv"
install=("$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt)
"${install[@]}" torch
platform=$(.venv/bin/python -c "from shardio.kernel.targets import find_platform; print(find_platform())")
"${install[@]}" "$work"/*-"$platform".whl hypothesis pytest pytest-xdist webdataset matplotlib

# Copy the tests without the package, so they import the installed package.
mkdir "$work/checkout"
cp -r pyproject.toml constraints.txt README.md tests tools benchmarks examples docs "$work/checkout"
cd "$work/checkout"
unset PYTHONDONTWRITEBYTECODE
"$work/venv/bin/python" -m pytest --numprocesses 2 --override-ini testpaths=tests -p no:cacheprovider tests/images tests/interop tests/kernel "$@"
