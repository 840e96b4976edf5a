#!/usr/bin/env bash
# Ranks the kernels of a training run by the time that they take, in hotspots/hotspot_<time>/.
#
# Usage: ./get_hotspots.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
TOOLS=(rocprofv3 torch) STEPS=10
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"

begin_result hotspots/hotspot "$@"

if [[ $TOOL == rocprofv3 ]]; then
    # CSV, as --stats writes nothing with ROCm 7's default, a database.
    rocprofv3_command "$RESULT/hotspots" --kernel-trace --marker-trace --stats --output-format csv
    run_or_fail "${COMMAND[@]}"
    require_file '*_kernel_stats.csv'
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file kernel_stats.csv
fi
report_or_miss "the table of the kernels" hotspots "$RESULT"

finish_result "$(suggestion "Compare with another run" compare "$RESULT" OTHER)" \
    "$(suggestion "Draw it" plot "$RESULT")" ${TOGETHER:+"$TOGETHER"}
