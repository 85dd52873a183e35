#!/usr/bin/env bash
# dist/, and a test that installs the wheel into an empty environment and imports every module
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/.installed
.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
.venv/bin/python -m pytest -q tests/test_wings.py -k wheel
