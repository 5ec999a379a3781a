#!/usr/bin/env bash
# Makes an environment in which XLA compiles for a device that is not there: bash bench/environments.sh cuda|tpu DIR
# It needs no driver; 6 GB of disk for cuda, 2 GB for tpu.
set -euo pipefail
case "${1:-}" in
cuda) extra=cuda12 ;;
tpu) extra=tpu ;;
*) echo "usage: bash bench/environments.sh cuda|tpu DIR" >&2 && exit 2 ;;
esac
directory=${2:?usage: bash bench/environments.sh cuda|tpu DIR}
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --editable "$(dirname "${BASH_SOURCE[0]}")/..[bench,$extra]"
"$directory/bin/python" -m pip install --quiet pytest pytest-xdist hypothesis scipy
