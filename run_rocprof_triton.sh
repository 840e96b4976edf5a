#!/usr/bin/env bash
# Runs the profiling session of Exercise 1: a timeline, memory traffic, counters and the inputs of a roofline. Its
# summary, rocprof_results/triton_analysis_summary.md, has launch overhead, bandwidth and utilisation.
#
# Usage: ./run_rocprof_triton.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# Without --output the recordings are written to rocprof_results/session_<time>/; older sessions are kept.
set -euo pipefail
TOOLS=(rocprofv3 ncu torch) STEPS=10
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"
# shellcheck source=profilers/counters.sh
source "$ROOT/profilers/counters.sh"

begin_result rocprof_results/session "$@"

# The training run comes first: it refuses what is wrong with its options at once.
note "--- 1. Basic: the timeline of a training run, then each kernel alone"
if [[ $TOOL == rocprofv3 ]]; then
    record_timeline basic
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
fi
run_or_fail "$PYTHON" "$ROOT/run_triton_profiling.py" --json "$RESULT/kernels_alone.json"
if [[ $TOOL == rocprofv3 ]]; then
    note "--- 2. to 4. Memory traffic, counters, roofline inputs: a run for each group of counters"
    default_passes
    [[ " ${PASSES[*]} " != *Mfma* ]] || PASSES+=("MfmaFlops")
    count_with_rocprofv3
elif [[ $TOOL == ncu ]]; then
    note "--- 2. to 4. Memory traffic, counters, roofline inputs: the kernels of one step"
    count_with_ncu
else
    note "--- 2. to 4. No hardware counters: they need rocprofv3 (AMD) or ncu (NVIDIA)."
fi
[[ $TOOL != ncu || -n $COUNTED ]] || TOOL=torch
report_or_miss "the pictures" plot "$RESULT" "$RESULT/kernels_alone.json"
report_or_miss "the summary" summary "$RESULT" --tool "$TOOL"

summary=$RESULT/triton_analysis_summary.md closing=()
if [[ -e $summary ]]; then
    # Before finish_result, which ends with 1 if a part is missing. A link to the newest; a file of that name is kept.
    newest=${RESULT%/*}/${summary##*/}
    if [[ -z $OUTPUT && (-L $newest || ! -e $newest) ]] && ln -sfn "${summary#"${RESULT%/*}/"}" "$newest"; then
        summary=$newest
    fi
    closing=("The summary: $summary")
fi
finish_result ${closing[@]+"${closing[@]}"}
