#!/usr/bin/env bash
# Records the timeline of a training run for Perfetto, in traces/trace_<time>/: kernels, copies, runtime calls, and the
# ranges that name steps, phases and layers. The same run gives the tables of its kernels and calls.
#
# Usage: ./get_trace.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
TOOLS=(rocprofv3 torch) STEPS=10
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"

begin_result traces/trace "$@"

if [[ $TOOL == rocprofv3 ]]; then
    record_timeline trace
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
fi
report_or_miss "the table of the kernels" hotspots "$RESULT"

finish_result "Open the trace in https://ui.perfetto.dev (it stays on your machine): w and s zoom, a and d move." \
    "Search for \"step\" to find the measured steps, for \"layers.0\" to find a layer." ${TOGETHER:+"$TOGETHER"}
