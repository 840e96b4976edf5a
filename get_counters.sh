#!/usr/bin/env bash
# Records every kernel of a training run, and with --pmc hardware counters, in counters/counter_<time>/.
#
# Usage: ./get_counters.sh [--pmc [NAME...]]... [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
#   --pmc          also count a default choice: instructions, memory traffic, cache hits, occupancy
#   --pmc A B      count these; each --pmc is a run of its own, as a GPU counts only a few things at a time
set -euo pipefail
TOOLS=(rocprofv3 ncu torch) STEPS=10
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"
# shellcheck source=profilers/counters.sh
source "$ROOT/profilers/counters.sh"

COUNT=''
take_option() {
    [[ $1 == --pmc ]] || return 0
    local names=()
    CONSUMED=1 COUNT=1
    for name in "${@:2}"; do
        [[ $name != -* ]] || break
        CONSUMED=$((CONSUMED + 1))
        names+=("${name//,/ }")
    done
    ((${#names[@]} == 0)) || PASSES+=("${names[*]}")
}

parse_arguments "$@"
if [[ -z $COUNT ]]; then
    [[ $TOOL != ncu ]] || die "--tool ncu only counts: add --pmc"
    TOOLS=(rocprofv3 torch)
elif [[ $TOOL == torch ]]; then
    die "--pmc needs hardware counters, which torch.profiler does not read: --tool rocprofv3 (AMD) or ncu (NVIDIA)"
fi
choose_tool
start_result counters/counter

if [[ $TOOL == rocprofv3 ]]; then
    format=csv
    # With --kernel-rename names in a database would not match those in the CSV files of the passes.
    [[ " ${TOOL_ARGUMENTS[*]-} " == *" --kernel-rename "* ]] || ! has_option rocpd 700 --help || format=rocpd
    rocprofv3_command "$RESULT/kernels" --kernel-trace --marker-trace --output-format "$format"
    run_or_fail "${COMMAND[@]}"
    if [[ $format == csv ]]; then
        require_file '*_kernel_trace.csv'
    else
        require_file '*_results.db'
        summarize_database "$RESULT/kernels_results.db"
    fi
    [[ -z $COUNT ]] || count_with_rocprofv3
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file kernel_stats.csv
    [[ $TOOL != ncu ]] || count_with_ncu
    [[ -z $COUNT || $TOOL == ncu ]] || note "No hardware counters: they need rocprofv3 (AMD) or ncu (NVIDIA)."
fi
report_or_miss "the table of the kernels" hotspots "$RESULT" --csv "$RESULT"
table=$RESULT/kernels_of_the_steps.csv
if [[ -e $RESULT/kernels.csv ]]; then
    table=$RESULT/kernels.csv
    miss "the measured steps, which the recording does not name: kernels.csv is of the whole run, warm-up included"
fi
[[ -z $COUNTED ]] || report_or_miss "the table of the counters" counters "$RESULT"

finish_result "The table as a file: $table" \
    "$(suggestion "Compare with another run" compare "$RESULT" OTHER)" ${TOGETHER:+"$TOGETHER"}
