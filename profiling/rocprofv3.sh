# shellcheck shell=bash
# Sourced after common.sh by the scripts that record with rocprofv3.

# rocprofv3_command FOLDER/NAME OPTIONS: sets COMMAND, which records PROGRAM into FOLDER/NAME_*. The user's own options
# come last, where they win.
rocprofv3_command() {
    COMMAND=(rocprofv3 "${@:2}" -d "${1%/*}" -o "${1##*/}")
    COMMAND+=(${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}")
}

# record_timeline NAME: one run for the trace that Perfetto opens and the tables that the reports read.
record_timeline() {
    local formats=(csv pftrace)
    ((RELEASE < 700)) || formats+=(rocpd)
    rocprofv3_command "$RESULT/$1" --runtime-trace --stats --output-format "${formats[@]}"
    run_or_fail "${COMMAND[@]}"
    require_file '*_results.pftrace'
    require_file '*_kernel_stats.csv'
}
