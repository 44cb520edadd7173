#!/usr/bin/env bash
# Installs shardio and demonstrates its main use: packs a directory of images, checks it, and trains from it.
#   bash tools/demo.sh [IMAGES]      IMAGES/class/…/name.jpg; creates synthetic photographs if you pass no IMAGES
# Needs a package index and Python 3.10 or newer (python3 by default; set PYTHON to use a different one).
set -euo pipefail
images=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."

if [[ ! -x .venv/bin/shardio ]]; then
  echo "installing shardio in .venv (only once; torch is a large download)"
  "${PYTHON:-python3}" -m venv .venv
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
  "${install[@]}" torch
  # Without --no-build-isolation, pip would also install the compiler for the stages of CUDA devices.
  "${install[@]}" editables hatchling ziglang
  "${install[@]}" --no-build-isolation --editable .
fi
shardio=.venv/bin/shardio
work=$(mktemp -d "${TMPDIR:-/tmp}/shardio-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT

run() {
  echo
  echo "\$ $*"
  "$@"
}

if [[ -z $images ]]; then
  images=$work/images
  run .venv/bin/python tools/make_images.py "$images" --classes 10 --per-class 60 --width 320 --height 240
fi
run "$shardio" pack "$images" "$work/packed" --max-shard-size 8MiB
run "$shardio" info "$work/packed"
run "$shardio" check "$work/packed" --world-size 2 --num-workers 2 --batch-size 16 --epochs 2
run "$shardio" train "$work/packed" --epochs 5
