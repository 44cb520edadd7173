#!/usr/bin/env bash
# Sets everything up and passes the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
exec bash tools/check.sh "$@"
