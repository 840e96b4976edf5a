#!/usr/bin/env bash
# Samples the call stacks of a whole training run beside its GPU activity, clocks and power, and in a second run the
# time of each Python function, in rocprof_sys/profile_<time>/.
#
# Usage: ./get_rocprof_sys.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# The options after a second -- are those of rocprof-sys-sample, such as -f 1000 or -E rcclp.
set -euo pipefail
TOOLS=(rocprof-sys torch) STEPS=10
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"

begin_result rocprof_sys/profile "$@"

if [[ $TOOL == rocprof-sys ]]; then
    # -run would not sample, and -P without -T would switch the trace off. From ROCm 10.1 on a trace for Perfetto has to
    # be asked for by --output-format, which excludes -T and -P.
    formats=(-T -P)
    ! has_option --output-format 714 --help=all || formats=(--output-format proto text)
    [[ " ${TOOL_ARGUMENTS[*]-} " != *" --output-format "* ]] || formats=()
    # With the tool's signal handler Python would not receive Ctrl-C, and thousands of lines of memory maps would follow
    # the reason of a crash.
    record=(env "ROCPROFSYS_ENABLE_SIGNAL_HANDLER=${ROCPROFSYS_ENABLE_SIGNAL_HANDLER:-OFF}" "${LAUNCH[@]}")
    record+=(-H -D ${formats[@]+"${formats[@]}"} -o "$RESULT")
    record+=(${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}")
    files=('perfetto-trace*.proto' 'perfetto-trace*.pftrace' '*.db')
    advice=("Open the trace in https://ui.perfetto.dev, the sampling_* and wall_clock* files in an editor.")
else
    record=("${PROGRAM[@]}" --profile "$RESULT")
    files=(trace.json)
    advice=("Open trace.json in https://ui.perfetto.dev")
fi
status=0 reason=''
run_logged "${record[@]}" || status=$? reason=$(explain "$?")
((status)) || find_recording "${files[@]}" || status=1 reason=$REASON
((status == 0)) || advice=()
[[ ${RECORDING:-} != *.db ]] || advice=("Make a trace for Perfetto of it: rocpd convert -i $RECORDING -f pftrace")

# Neither records Python functions; a second run does, whatever became of the first.
module_command host_profile "$RESULT/host_profile.pstats" "${PROGRAM[@]:1}"
host_status=0
run_logged "${COMMAND[@]}" || host_status=$?
if ((host_status == 0)); then
    advice+=("What called what on the host: $(quoted "$PYTHON" -m pstats "$RESULT/host_profile.pstats")")
    ((status == 0)) || miss "the timeline ($reason)"
elif ((status)); then
    fail "$status" "$reason"
else
    miss "the time of each Python function ($(explain "$host_status")); try again: $(quoted "${COMMAND[@]}")"
fi
finish_result "${advice[@]}"
