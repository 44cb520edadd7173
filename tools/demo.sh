#!/usr/bin/env bash
# Sets up the environment and shows the main use: packs a directory of images, checks it, and trains from it.
#   bash tools/demo.sh [IMAGES]      IMAGES/class/…/name.jpg; creates synthetic photographs if you pass no IMAGES
set -euo pipefail
images=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."

bash tools/setup.sh
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
  run .venv/bin/python tools/make_images.py "$images" --classes 10 --per-class 60
fi
run "$shardio" pack "$images" "$work/packed" --max-shard-size 8MiB
run "$shardio" info "$work/packed"
run "$shardio" check "$work/packed" --world-size 2 --num-workers 2 --batch-size 16 --epochs 2
run "$shardio" train "$work/packed" --epochs 5
