#!/usr/bin/env bash
# Says what keeps the project from running well on this machine, and what to do about it; run it first.
# Usage: [PYTHON=python3] profiling/doctor.sh [--json] [--time-limit SECONDS]
set -euo pipefail
# shellcheck source=profiling/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! choose_python; then
    text="there is no $PYTHON here"
    remedy="install Python 3.10 or newer, or name one: PYTHON=/path/to/python profiling/doctor.sh"
    if [[ " $* " == *" --json "* ]]; then
        printf '{"findings": [{"probe": "python", "level": "FAIL", "text": "%s", "remedy": "%s"}], "counts": {"OK": 0, "WARN": 0, "FAIL": 1}}\n' "$text" "$remedy"
    else
        printf 'FAIL  python     %s\n                 %s\n' "$text" "$remedy"
    fi
    exit 1
fi
module_command doctor "$@"
exec "${COMMAND[@]}"
