#!/usr/bin/env bash
# Measures how well each kernel of a training step or of any program uses the GPU. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_rocprof_compute.sh "$@"
