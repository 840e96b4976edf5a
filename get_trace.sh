#!/usr/bin/env bash
# Records the timeline of a training run for Perfetto, in traces/trace_<time>/: kernels, copies, runtime calls, and the
# ranges that name steps, phases and layers.
#
# Usage: ./get_trace.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
TOOLS=(rocprofv3 torch)
# shellcheck source=profiling/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profiling/common.sh"

parse_arguments "$@"
choose_tool
start_result traces/trace

if [[ $TOOL == rocprofv3 ]]; then
    run_or_fail rocprofv3 --runtime-trace --output-format pftrace -d "$RESULT" -o trace -- "${PROGRAM[@]}"
    require_file '*_results.pftrace'
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
fi

finish_result "Open the trace in https://ui.perfetto.dev (it stays on your machine): w and s zoom, a and d move." \
    "Search for \"step\" to find the measured steps, for \"layers.0\" to find a layer."
