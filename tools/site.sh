#!/usr/bin/env bash
# Builds the documentation site in site/. Fails if a page, a link or an anchor is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
export NO_MKDOCS_2_WARNING=1 # An advertisement of the theme.
exec .venv/bin/python -m mkdocs build --strict --quiet
