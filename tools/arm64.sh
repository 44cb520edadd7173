#!/usr/bin/env bash
# Runs tests of the last commit on an emulated 64-bit ARM processor, in a separate Debian system. As root:
#   bash tools/arm64.sh [TEST…]
# Without arguments, runs all tests that depend on the processor.
# Needs the packages debootstrap, qemu-user-static and binfmt-support.
# If ARM64_ROOT is set, the system is kept in that directory.
# OPENCV sets the version of OpenCV to install (default: the newest).
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -gt 0 ]] || set -- tests/images tests/kernel tests/order tests/shards tests/storage tests/transforms/test_geometry.py
bash tools/setup.sh
root=${ARM64_ROOT:-$(mktemp -d "${TMPDIR:-/tmp}/shardio-arm64.XXXXXX")}
trap 'umount "$root"/{proc,dev} 2>/dev/null || true; [[ -n ${ARM64_ROOT:-} ]] || rm -rf "$root"' EXIT
grep -qs binfmt_misc /proc/mounts || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
update-binfmts --enable qemu-aarch64
[[ -e $root/usr/bin/python3 ]] || debootstrap --arch=arm64 --variant=minbase --include=ca-certificates,python3-venv bookworm "$root"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # The host's file may have more certificate authorities.
rm -rf "$root/shardio"
git clone --quiet . "$root/shardio"
# Build the wheel outside the emulator, because compiling inside it would take minutes.
SHARDIO_PLATFORM=manylinux_2_17_aarch64 .venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --no-build-isolation --wheel-dir "$root/shardio" "$root/shardio"
rm -r "$root/shardio/shardio" # The tests import the installed package.
chroot "$root" env -i HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 OPENCV="${OPENCV:-}" bash -euo pipefail -c '
  cd /shardio
  [[ -x /venv/bin/python ]] || python3 -m venv /venv
  # torch 2.6 has a build without CUDA for ARM.
  pip=(/venv/bin/pip install --quiet --no-compile) # Compiling modules that no test imports would take minutes.
  "${pip[@]}" torch==2.6.0 "opencv-python-headless${OPENCV:+==$OPENCV}" hypothesis pytest webdataset *.whl
  "${pip[@]}" --force-reinstall --no-deps *.whl # Otherwise, pip keeps a package of the same version.
  /venv/bin/shardio --version
  exec /venv/bin/python -m pytest -p no:cacheprovider "$@"' bash "$@"
