#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: passes the tests that need one, then measures the way to it.
#   bash tools/gpu_check.sh [ARGUMENTS]      for the benchmark; --help shows them
# Runs in .venv, or with the Python that $PYTHON names. Nothing is installed or fetched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "there is no $python: make it by 'bash tools/setup.sh', or name another Python, as PYTHON=python3" >&2
  exit 1
fi

"$python" - <<'END'
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"torch is not installed for {sys.executable}: pip install torch, in a build for CUDA")
import torch

if torch.version.cuda is None:
    sys.exit(
        f"torch {torch.__version__} is a build without CUDA: install one for the CUDA that nvidia-smi shows, for "
        "13.0 by pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    )
if not torch.cuda.is_available():
    sys.exit(
        f"torch {torch.__version__}, for CUDA {torch.version.cuda}, sees no GPU: nvidia-smi must show one, and its "
        "driver must be new enough for that CUDA (or CUDA_VISIBLE_DEVICES hides it)"
    )
needed = "braceexpand cv2 filelock hypothesis matplotlib numba PIL platformdirs pydantic pytest simplejpeg typer webdataset xxhash"
if missing := [module for module in needed.split() if importlib.util.find_spec(module) is None]:
    sys.exit(
        f"not installed: {', '.join(missing)}: pip install -c constraints.txt -e '.[dev]' brings them (beside the torch "
        "that is there). torch and numpy are enough for python -m benchmarks.bench_device --source memory"
    )
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
END

"$python" -m pytest -m cuda
"$python" -m benchmarks.bench_device "$@"
echo "The figures lie in benchmarks/results/, unless --results said otherwise:"
ls -t benchmarks/results/*-device-*.json 2>/dev/null || true
