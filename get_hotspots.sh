#!/usr/bin/env bash
# Ranks the kernels of a training run or of any program by the time that they take. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_hotspots.sh "$@"
