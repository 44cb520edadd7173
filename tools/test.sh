#!/usr/bin/env bash
# Sets up the environment and runs all checks and tests. With --all, also runs the slow tests.
# Passes other arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
bash tools/servers.sh
exec bash tools/check.sh "$@"
