#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: runs the tests that need one, then benchmarks the transfer of batches to it.
#   bash tools/gpu_check.sh [ARGUMENTS]      passes ARGUMENTS to the benchmark; --help lists them
# Runs with .venv's Python, or set PYTHON to another one. Installs and downloads nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "$python does not exist: create it with 'bash tools/setup.sh', or set PYTHON=python3" >&2
  exit 1
fi

"$python" - <<'END'
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"torch is not installed for {sys.executable}: pip install a build of torch for CUDA")
import torch

if torch.version.cuda is None:
    sys.exit(
        f"torch {torch.__version__} is a build without CUDA: install a build for the CUDA version that nvidia-smi "
        "shows; for 13.0: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    )
if not torch.cuda.is_available():
    sys.exit(
        f"torch {torch.__version__}, for CUDA {torch.version.cuda}, finds no GPU: check that nvidia-smi shows one, that "
        "its driver supports that CUDA version, and that CUDA_VISIBLE_DEVICES does not hide it"
    )
needed = "braceexpand cv2 filelock hypothesis matplotlib PIL platformdirs pydantic pytest simplejpeg typer webdataset xxhash"
if missing := [module for module in needed.split() if importlib.util.find_spec(module) is None]:
    sys.exit(
        f"not installed: {', '.join(missing)}: install them with pip install -c constraints.txt -e '.[dev]', which keeps "
        "the installed torch. python -m benchmarks.bench_device --source memory needs only torch and numpy"
    )
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
END

"$python" -m pytest -m cuda
"$python" -m benchmarks.bench_device "$@"
echo "The results are in benchmarks/results/, or in the folder given by --results:"
ls -t benchmarks/results/*-device-*.json 2>/dev/null || true
