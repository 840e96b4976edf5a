#!/usr/bin/env bash
# Runs the profiling session of Exercise 1: a timeline, memory traffic, counters and the inputs of a roofline. Its
# summary, rocprof_results/triton_analysis_summary.md, has launch overhead, bandwidth and utilisation.
#
# Usage: ./run_rocprof_triton.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# Without --output the recordings are written to rocprof_results/session_<time>/; older sessions are kept.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record run_rocprof_triton.sh "$@"
