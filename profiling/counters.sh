# shellcheck shell=bash
# Sourced after common.sh by the scripts that read hardware counters, with rocprofv3 or with ncu.

# What fits into one pass each on gfx90a and gfx942. FETCH_SIZE and WRITE_SIZE do not fit together on the latter, which
# has no L2CacheHit either: the reports compute the rate from hits and misses.
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

# One run of the program for each of PASSES (each a list of counters), into counters/pass_N.
count_with_rocprofv3() {
    local pass number=0
    ((${#PASSES[@]})) || default_passes
    for pass in "${PASSES[@]}"; do
        number=$((number + 1))
        # shellcheck disable=SC2086  # a list of names
        run_or_fail rocprofv3 --pmc $pass --output-format csv -d "$RESULT/pass_$number" -o counters -- "${PROGRAM[@]}"
        require_file '*_counter_collection.csv' "pass_$number" "the GPU may know none of: $pass (rocprofv3-avail list)"
    done
}

# ncu runs each kernel of one step again for every group of counters, and leaves the clock alone.
# Returns its status; the arguments are options that choose what is measured.
run_ncu() {
    run_logged ncu --nvtx --nvtx-include step/ --clock-control none --print-kernel-base demangled "$@" \
        -f -o "$RESULT/ncu" "${PROGRAM[@]}" --num-steps 1 --warmup-steps 1 || return
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
    ((status == 0)) || fall_back_to_torch "$(explain "$status")" "$status"
}

# Statistics of a database by ROCm's own rocpd, where there is one (7.1 and newer); our reports read the database itself.
summarize_database() {
    if ! command -v rocpd >/dev/null; then
        note "No rocpd command here: the reports read the database themselves."
    elif ! run_logged rocpd summary -i "$1" -f csv -d "$RESULT" -o rocpd; then
        note "rocpd failed (another Python than it was made for, or no pandas): the reports read the database themselves."
    fi
}
