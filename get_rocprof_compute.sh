#!/usr/bin/env bash
# Measures how well each kernel of a training step uses the GPU, in rocprof_compute/profile_<time>/: share of the peak
# (speed of light), occupancy, caches and memory. On AMD with rocprof-compute, on NVIDIA with ncu.
#
# Usage: ./get_rocprof_compute.sh [--kernels N] [--operators] [--output DIR] [--stage N] [--tool NAME] [--dry-run]
#                                 [-- OPTIONS [-- OPTIONS]]
#
#   --kernels N    rocprof-compute: report on each of the N kernels that take the most time, 5 without it
#   --operators    rocprof-compute, experimental: list PyTorch operators and, since ROCm 10.0, launches of Triton
#                  kernels with what they cost
#
# The tools repeat the program or its kernels about ten times, so that a single step takes a few minutes. The options
# after a second -- are those of rocprof-compute profile or of ncu, such as -k rmsnorm_kernel.
set -euo pipefail
TOOLS=(rocprof-compute ncu torch) STEPS=1
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"
# shellcheck source=profilers/counters.sh
source "$ROOT/profilers/counters.sh"

KERNELS=5 OPERATORS=
take_option() {
    [[ $1 != --operators ]] || CONSUMED=1 OPERATORS=1
    [[ $1 == --kernels ]] || return 0
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--kernels needs a number of kernels, such as 5${2:+, and not $2}"
    CONSUMED=2 KERNELS=$2
}

# Ends the script if rocprof-compute would fail, or give misleading results, after minutes.
check_request() {
    local word
    find_launcher
    ((PROCESSES == 1)) || die "rocprof-compute profiles one process at a time on a node, and $PROCESSES were started:" \
        "start this script without a launcher, or get_counters.sh --pmc with it"
    for word in ${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"}; do
        case $word in
        -p | --path | --output-directory) die "rocprof-compute's $word is taken: --output says where the result goes" ;;
        esac
    done
    # 6.x sets this locale regardless of LC_ALL.
    if [[ -z $DRY_RUN ]] && ((RELEASE < 700)) && ! locale -a 2>/dev/null | grep -qix 'en_US\.utf-\?8'; then
        die "rocprof-compute of ROCm $(dotted "$RELEASE") needs the locale en_US.UTF-8, which is not on this machine:" \
            "localedef -i en_US -f UTF-8 en_US.UTF-8 as root, after installing the package locales (or glibc-langpack-en)"
    fi
}

# Exports ROCM_PATH, the installation of rocprof-compute: bin/rocprof-compute is a link into libexec.
export_own_rocm() {
    local tool root
    tool=$(readlink -f "$FOUND") || true
    for root in "${tool%/libexec/*}" "${tool%/bin/*}" "${tool%/_rocm_*}/_rocm_sdk_core" "$ROCM_PATH"; do
        ! compgen -G "$root/lib/librocprofiler-sdk.so*" >/dev/null || break
    done
    export ROCM_PATH=$root
}

# Sets OPTIONS of profile and SECTIONS of analyze: whole sections, as single metrics are renumbered between releases.
choose_options() {
    local word name
    OPTIONS=(--no-roof) SECTIONS=(-b 2 6.2 16.1 17.1) ROOFLINE='' LISTS=()
    for word in ${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"}; do
        case $word in
        --roof-only) OPTIONS=() ROOFLINE=1 ;;
        -b | --block | --set) SECTIONS=() ;; # what was counted decides
        esac
    done
    # Releases with this option look for the library, and for a Python module beside it, in /opt/rocm, newer ones under
    # ROCM_PATH.
    if ((RELEASE < 712)) && has_option --rocprofiler-sdk-library-path 700 profile --help; then
        OPTIONS+=(--rocprofiler-sdk-library-path "$ROCM_PATH/lib/librocprofiler-sdk.so")
    fi
    [[ -z $OPERATORS ]] || for name in torch:712 triton:1000; do
        ! has_option "--${name%:*}-trace" "${name#*:}" profile --experimental --help ||
            OPTIONS+=("--${name%:*}-trace") LISTS+=("--list-${name%:*}-operators")
    done
    [[ -z $OPERATORS || ${#LISTS[@]} -gt 0 ]] ||
        die "--operators needs a rocprof-compute with --torch-trace, of ROCm 7.12 or newer; this one has none: $FOUND"
    ((${#LISTS[@]} == 0)) || OPTIONS+=(--experimental)
    OPTIONS+=(${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"})
}

# Sets WORKLOAD, the folder of the counters. sysinfo.csv exists even if nothing was counted.
find_workload() {
    require_file 'pmc_perf*.csv' 'results_*.csv*' '*.db' # the second since 7.12, the third where these are not written
    WORKLOAD=$(find "$RESULT/workloads" -name sysinfo.csv -printf '%h\n' 2>/dev/null | head -n 1) || true
    WORKLOAD=${WORKLOAD:-$RESULT/workloads/tiny_llama/GPU_MODEL}
}

# analyze TITLE ARGUMENTS. If an analysis fails it is missing, and the counters are kept.
analyze() {
    local command=("${LAUNCH[@]}" analyze -p "$WORKLOAD" "${@:2}") status=0
    note "$1" | tee -a "${LOG:-/dev/null}"
    run_logged "${command[@]}" || status=$?
    ((status == 0)) || miss "an analysis ($(explain "$status")); try again: $(quoted "${command[@]}")"
    return "$status"
}

# Without -k, an analysis shows the average over all kernels.
analyze_each_kernel() {
    local kernels number title
    analyze "Kernels and dispatches:" --list-stats || return 0
    if [[ -n $DRY_RUN ]]; then
        analyze "For each of the first $KERNELS of these kernels, of which KERNEL is the number:" \
            ${SECTIONS[@]+"${SECTIONS[@]}"} -k KERNEL
        return
    fi
    module_command rocprof_compute_kernels "$WORKLOAD" --top "$KERNELS"
    if ! kernels=$("${COMMAND[@]}" 2>&1); then
        miss "each kernel by itself ($kernels)"
        analyze "The average of all kernels:" ${SECTIONS[@]+"${SECTIONS[@]}"} || true
        return 0
    fi
    while IFS=$'\t' read -r number title; do
        analyze "$title" ${SECTIONS[@]+"${SECTIONS[@]}"} -k "$number" || return 0
    done <<<"$kernels"
}

run_rocprof_compute() {
    local word begin=0
    # It joins the words by spaces and splits them again.
    for word in "${PROGRAM[@]}"; do
        [[ $word != *[[:space:]\;\"\']* ]] || die "rocprof-compute cannot pass on \"$word\": no spaces, quotes or ;"
    done
    # The meaning of -p depends on the release; below the working directory all releases agree.
    IN=$RESULT run_or_fail "${LAUNCH[@]}" profile -n tiny_llama "${OPTIONS[@]}" -- "${PROGRAM[@]}"
    if [[ -n $ROOFLINE ]]; then
        require_file roofline.csv
        word=$(quoted "${LAUNCH[@]}" analyze -p "${RECORDING%/*}" -b 4)
        finish_result "The roofline: empirRoof_* beside it or, since ROCm 7.13, $word"
        return
    fi
    find_workload
    [[ -n $DRY_RUN ]] || begin=$(wc -c <"$LOG")
    analyze_each_kernel
    ((${#LISTS[@]} == 0)) || analyze "Operators and their kernels:" --experimental "${LISTS[@]}" || true
    [[ -n $DRY_RUN ]] || tail -c "+$((begin + 1))" "$LOG" >"$RESULT/analysis.txt"
    finish_result "All of this as text: $RESULT/analysis.txt" \
        "Everything that was measured: $(quoted "${LAUNCH[@]}" analyze -p "$WORKLOAD")" \
        "Sections, -b: 2 speed of light, 6.2 what limits occupancy, 12 LDS, 16 vector L1, 17 L2. Kernels, -k: --list-stats"
}

parse_arguments "$@"
choose_tool
[[ -z $OPERATORS || $TOOL == rocprof-compute ]] || die "--operators needs rocprof-compute, and this run uses $TOOL"
if [[ $TOOL == rocprof-compute ]]; then
    check_request
    export_own_rocm
    choose_options
    # The kernels of the warm-up are counted too. One step, which --graph needs, has the same kernels as a measured one.
    ARGUMENTS=(--warmup-steps 1 ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
fi
start_result rocprof_compute/profile

case $TOOL in
rocprof-compute)
    run_rocprof_compute
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
    report_or_miss "the table of the counters" counters "$RESULT"
    finish_result "Open in Nsight Compute: ncu-ui $RESULT/ncu.ncu-rep" \
        "As text: ncu --import $RESULT/ncu.ncu-rep --page details"
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file kernel_stats.csv
    report_or_miss "the table of the kernels" hotspots "$RESULT"
    finish_result "Times only: hardware counters need rocprof-compute on an AMD GPU, or ncu on an NVIDIA GPU." \
        "Bandwidth and arithmetic of each Triton kernel, from what it must do: $(quoted "$PYTHON" "$ROOT/run_triton_profiling.py")"
fi
