# shellcheck shell=bash
# Sourced after common.sh by the scripts that read hardware counters, with rocprofv3 or ncu. Counters that cannot be
# read are missing from the result, and the rest is kept; COUNTED is set if there is anything to report.
COUNTED='' PASSES=()

# Each entry fits into a pass on gfx90a and gfx942. FETCH_SIZE and WRITE_SIZE do not fit together on gfx942, which also
# has no L2CacheHit: the reports compute the rate from hits and misses.
CDNA_PASSES=(
    "SQ_WAVES SQ_INSTS_VALU SQ_INSTS_VMEM_RD SQ_INSTS_VMEM_WR SQ_INSTS_LDS SQ_INSTS_SALU GRBM_COUNT GRBM_GUI_ACTIVE"
    "FETCH_SIZE"
    "WRITE_SIZE TCC_HIT_sum TCC_MISS_sum"
    "MeanOccupancyPerCU"
    "VALUUtilization VALUBusy MfmaUtil"
)
RDNA_PASSES=("SQ_WAVES SQ_INSTS_VALU SQ_INSTS_LDS GRBM_COUNT GRBM_GUI_ACTIVE" "FETCH_SIZE" "WRITE_SIZE" "OccupancyPercent")
NCU_METRICS=(
    gpu__time_duration.sum
    sm__throughput.avg.pct_of_peak_sustained_elapsed
    gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed
    gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
    dram__bytes_read.sum
    dram__bytes_write.sum
    lts__t_sector_hit_rate.pct
    sm__warps_active.avg.pct_of_peak_sustained_active
    smsp__inst_executed.sum
    launch__registers_per_thread
)

default_passes() {
    local arch=''
    if command -v rocminfo >/dev/null; then arch=$(rocminfo 2>/dev/null | grep -om1 'gfx[0-9a-f]*') || true; fi
    if [[ $arch == gfx1* ]]; then PASSES=("${RDNA_PASSES[@]}"); else PASSES=("${CDNA_PASSES[@]}"); fi
}

# Runs the program for each of PASSES, a list of counters, into pass_N. The ranges mark the measured steps.
count_with_rocprofv3() {
    local pass number=0 status
    ((${#PASSES[@]})) || default_passes
    for pass in "${PASSES[@]}"; do
        number=$((number + 1)) status=0
        # shellcheck disable=SC2086  # a list of names
        rocprofv3_command "$RESULT/pass_$number/counters" --pmc $pass --kernel-trace --marker-trace --output-format csv
        run_logged "${COMMAND[@]}" || status=$?
        if ((status == 0)); then
            look_for_counters "$number" "$pass"
        else
            miss "$pass: $(explain "$status")"
            [[ ! -d $RESULT/pass_$number ]] || mv "$RESULT/pass_$number" "$RESULT/pass_$number.failed"
        fi
    done
}

# look_for_counters PASS NAMES: rocprofv3 drops unknown counters with a warning and ends with status 0.
look_for_counters() {
    local name found='' dropped=()
    if [[ -n $DRY_RUN ]]; then
        COUNTED=1
        return
    fi
    for name in $2; do
        # A name may end in :device=0
        if grep -rqsF --include='*_counter_collection.csv' "\"${name%%:*}\"" "$RESULT/pass_$1"; then
            found=1
        else
            dropped+=("$name")
        fi
    done
    COUNTED=${COUNTED:-$found}
    if ((${#dropped[@]})); then
        miss "${dropped[*]}: this GPU, or this release, does not know them (rocprofv3 -L lists those that it does)"
    fi
}

# Runs ncu, which repeats each kernel of one step for every group of counters and does not lock the clock. The
# arguments are options that select the counters. Returns its status.
run_ncu() {
    run_logged ncu --nvtx --nvtx-include step/ --clock-control none --print-kernel-base demangled "$@" \
        -f -o "$RESULT/ncu" ${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} \
        "${PROGRAM[@]}" --num-steps 1 --warmup-steps 1 || return
    [[ -n $DRY_RUN || -s $RESULT/ncu.ncu-rep ]] || return 1
    if [[ -n $DRY_RUN ]]; then
        note "ncu --import $(quoted "$RESULT/ncu.ncu-rep") --csv --page raw --print-units base > ncu_raw.csv"
    else
        ncu --import "$RESULT/ncu.ncu-rep" --csv --page raw --print-units base --print-kernel-base demangled \
            >"$RESULT/ncu_raw.csv" 2>>"$LOG"
    fi
}

count_with_ncu() {
    local metrics=("${PASSES[@]}") status=0
    ((${#metrics[@]})) || metrics=("${NCU_METRICS[@]}")
    metrics=("$(echo "gpu__time_duration.sum ${metrics[*]}" | tr ' ' '\n' | sort -u | paste -sd,)")
    run_ncu --metrics "${metrics[0]}" || status=$?
    if ((status == 0)); then
        COUNTED=1
    else
        miss "hardware counters: $(explain "$status")"
        rm -f "$RESULT/ncu_raw.csv"
    fi
}

# Writes statistics of a database by ROCm's rocpd, if it exists (since 7.1); our reports read the database itself.
summarize_database() {
    local rocpd=rocpd
    # shellcheck disable=SC2153  # find_rocm_tool sets FOUND
    [[ ${LAUNCH[0]} != */* ]] || rocpd=${FOUND%/*}/rocpd
    if ! command -v "$rocpd" >/dev/null && [[ -z $DRY_RUN || $RELEASE -lt 701 ]]; then
        note "No rocpd command here: the reports read the database themselves."
    elif ! run_logged "$rocpd" summary -i "$1" -f csv -d "$RESULT" -o rocpd; then
        note "rocpd failed (another Python than it was made for, or no pandas): the reports read the database themselves."
    fi
}
