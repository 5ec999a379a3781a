#!/usr/bin/env bash
# Create an environment in which XLA compiles for an absent device: bash bench/environments.sh cuda|tpu DIR
# No driver is needed. The environment takes 6 GB of disk space for cuda, or 2 GB for tpu.
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
