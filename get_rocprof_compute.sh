#!/usr/bin/env bash
# Measures how well each kernel of a training step uses the GPU, in rocprof_compute/profile_<time>/: share of the peak
# (speed of light), occupancy, caches and memory. On AMD with rocprof-compute, on NVIDIA with ncu.
#
# Usage: ./get_rocprof_compute.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# The tools repeat the program or its kernels some ten times over: a single step is enough, and takes a few minutes.
set -euo pipefail
TOOLS=(rocprof-compute ncu torch) STEPS=1
# shellcheck source=profiling/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profiling/common.sh"
# shellcheck source=profiling/counters.sh
source "$ROOT/profiling/counters.sh"

parse_arguments "$@"
choose_tool
start_result rocprof_compute/profile

case $TOOL in
rocprof-compute)
    # It joins the words with spaces and splits them again.
    for word in "${PROGRAM[@]}"; do
        [[ $word != *[[:space:]\;\"\']* ]] || die "rocprof-compute cannot pass on \"$word\": no spaces, quotes or ;"
    done
    # The folder that -p or --path names depends on the release; below the working directory all agree.
    IN=$RESULT run_or_fail rocprof-compute profile -n tiny_llama --no-roof -- "${PROGRAM[@]}"
    require_file sysinfo.csv
    workload=$(find "$RESULT/workloads" -name sysinfo.csv -printf '%h\n' 2>/dev/null | head -n 1) || true
    workload=${workload:-$RESULT/workloads/tiny_llama/GPU_MODEL}
    # Whole sections: the numbers of single metrics move between releases.
    run_or_fail rocprof-compute analyze -p "$workload" -b 2 6.2 16.1 17.1
    finish_result "Everything that was measured: rocprof-compute analyze -p $workload" \
        "Sections, -b: 2 speed of light, 6.2 what limits occupancy, 12 LDS, 16 vector L1, 17 L2."
    exit
    ;;
ncu)
    status=0
    run_ncu --section SpeedOfLight --section Occupancy --section MemoryWorkloadAnalysis --section LaunchStats \
        --metrics "$(IFS=, && echo "${NCU_METRICS[*]}")" || status=$?
    ((status == 0)) || fall_back_to_torch "$(explain "$status")" "$status"
    ;;
esac
if [[ $TOOL == ncu ]]; then
    report counters "$RESULT"
    finish_result "Open in Nsight Compute: ncu-ui $RESULT/ncu.ncu-rep" \
        "As text: ncu --import $RESULT/ncu.ncu-rep --page details"
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file kernel_stats.csv
    report hotspots "$RESULT"
    finish_result "Times only: hardware counters need rocprof-compute on an AMD GPU, or ncu on an NVIDIA GPU." \
        "Bandwidth and arithmetic of each Triton kernel, from what it must do: $(quoted "$PYTHON" "$ROOT/run_triton_profiling.py")"
fi
