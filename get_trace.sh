#!/usr/bin/env bash
# Records the timeline of a training run for Perfetto, in traces/trace_<time>/: kernels, copies, runtime calls, and the
# ranges that name steps, phases and layers. The same run gives the tables of its kernels and calls.
#
# Usage: ./get_trace.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_trace.sh "$@"
