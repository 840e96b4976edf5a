#!/usr/bin/env bash
# Samples the call stacks of a whole training run beside its GPU activity, in rocprof_sys/profile_<time>/.
#
# Usage: ./get_rocprof_sys.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
TOOLS=(rocprof-sys torch)
# shellcheck source=profiling/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/profiling/common.sh"

parse_arguments "$@"
choose_tool
start_result rocprof_sys/profile

if [[ $TOOL == rocprof-sys ]]; then
    # -sample and not -run, which samples nothing by itself; -P alone would switch the trace off.
    run_or_fail rocprof-sys-sample -T -P -o "$RESULT" -- "${PROGRAM[@]}"
    require_file 'perfetto-trace*.proto'
    finish_result "Open the .proto file in https://ui.perfetto.dev, the sampling_* and wall_clock* files in an editor." \
        "Thousands of lines of memory maps in log.txt mean that the program crashed: the reason stands above ### ERROR ###."
else
    run_or_fail "${PROGRAM[@]}" --profile "$RESULT"
    require_file trace.json
    report host_profile "$RESULT/host_profile.pstats" "${PROGRAM[@]:1}"
    require_file host_profile.pstats
    finish_result "Open trace.json in https://ui.perfetto.dev" \
        "What called what on the host: $(quoted "$PYTHON" -m pstats "$RESULT/host_profile.pstats")"
fi
