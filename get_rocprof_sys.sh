#!/usr/bin/env bash
# Samples the call stacks of a whole training run beside its GPU activity, clocks and power, and in a second run the
# time of each Python function, in rocprof_sys/profile_<time>/.
#
# Usage: ./get_rocprof_sys.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# The options after a second -- are those of rocprof-sys-sample, such as -f 1000 or -E rcclp.
set -euo pipefail
TOOLS=(rocprof-sys torch)
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/common.sh"

begin_result rocprof_sys/profile "$@"

if [[ $TOOL == rocprof-sys ]]; then
    # -run would not sample, and -P without -T would switch the trace off. With the tool's signal handler Python would
    # not receive Ctrl-C, and thousands of lines of memory maps would follow the reason of a crash.
    run_or_fail env "ROCPROFSYS_ENABLE_SIGNAL_HANDLER=${ROCPROFSYS_ENABLE_SIGNAL_HANDLER:-OFF}" \
        rocprof-sys-sample -T -P -H -D -o "$RESULT" ${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}"
    require_file 'perfetto-trace*.proto'
    advice=("Open the .proto file in https://ui.perfetto.dev, the sampling_* and wall_clock* files in an editor.")
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
    advice=("Open trace.json in https://ui.perfetto.dev")
fi

# Neither records Python functions; a second run does.
module_command host_profile "$RESULT/host_profile.pstats" "${PROGRAM[@]:1}"
if run_logged "${COMMAND[@]}"; then
    advice+=("What called what on the host: $(quoted "$PYTHON" -m pstats "$RESULT/host_profile.pstats")")
else
    miss "the time of each Python function ($(explain "$?")); try again: $(quoted "${COMMAND[@]}")"
fi
finish_result "${advice[@]}"
