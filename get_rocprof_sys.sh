#!/usr/bin/env bash
# Samples the call stacks of a whole training run beside its GPU activity, clocks and power, and in a second run the
# time of each Python function, in rocprof_sys/profile_<time>/.
#
# Usage: ./get_rocprof_sys.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# What follows a second -- are options of rocprof-sys-sample, such as -f 1000 or -E rcclp.
set -euo pipefail
TOOLS=(rocprof-sys torch)
# shellcheck source=profiling/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profiling/common.sh"

parse_arguments "$@"
choose_tool
start_result rocprof_sys/profile

if [[ $TOOL == rocprof-sys ]]; then
    # -sample and not -run, which samples nothing by itself; -P alone would switch the trace off. With its handler of
    # signals Python would not see Ctrl-C, and the reason of a crash would stand above thousands of lines of memory maps.
    run_or_fail env "ROCPROFSYS_ENABLE_SIGNAL_HANDLER=${ROCPROFSYS_ENABLE_SIGNAL_HANDLER:-OFF}" \
        rocprof-sys-sample -T -P -H -D -o "$RESULT" ${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}"
    require_file 'perfetto-trace*.proto'
    advice=("Open the .proto file in https://ui.perfetto.dev, the sampling_* and wall_clock* files in an editor.")
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
    advice=("Open trace.json in https://ui.perfetto.dev")
fi

# Neither names the Python functions: a second run does.
module_command host_profile "$RESULT/host_profile.pstats" "${PROGRAM[@]:1}"
if run_logged "${COMMAND[@]}"; then
    advice+=("What called what on the host: $(quoted "$PYTHON" -m pstats "$RESULT/host_profile.pstats")")
else
    miss "the time of each Python function ($(explain "$?")); try again: $(quoted "${COMMAND[@]}")"
fi
finish_result "${advice[@]}"
