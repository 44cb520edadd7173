#!/usr/bin/env bash
# Sets everything up and runs the main job: pack a directory of images, check it, train from it.
#   bash tools/demo.sh [IMAGES]      IMAGES/class/…/name.jpg; synthetic photographs are made if none is given
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
