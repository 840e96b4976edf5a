#!/usr/bin/env bash
# Runs the profiling session of Exercise 1. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record run_rocprof_triton.sh "$@"
