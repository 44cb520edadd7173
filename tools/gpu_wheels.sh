#!/usr/bin/env bash
# Collects wheels for a machine with a GPU and no network: those that tools/gpu_check.sh installs where packages are
# missing, and shardio's own, which contains the compiled kernel.
#   bash tools/gpu_wheels.sh DIRECTORY [PYTHON_VERSION]     by default for Python 3.12
# Large packages that such machines usually have are left out: torch, torchvision, timm, numpy, OpenCV, matplotlib.
set -euo pipefail
if [[ $# -lt 1 ]]; then
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
fi
directory=$(realpath -m "$1")
version=${2:-3.12}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh

packages=(
  annotated-doc annotated-types braceexpand click cloudpickle filelock hypothesis iniconfig markdown-it-py mdurl msgpack
  packaging pillow platformdirs pluggy pydantic pydantic_core Pygments pytest PyYAML rich safetensors shellingham simplejpeg
  sortedcontainers typer typing-inspection typing_extensions webdataset xxhash
)
mkdir -p "$directory"
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --constraint constraints.txt --python-version "$version" --platform manylinux2014_x86_64 \
  --platform manylinux_2_28_x86_64 --dest "$directory" "${packages[@]}"
SHARDIO_KERNEL=require .venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$directory" .
du -sh "$directory"
