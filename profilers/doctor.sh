#!/usr/bin/env bash
# Reports what prevents the project from running well on this machine, and the remedies. Run it first.
# Usage: [PYTHON=python3] profilers/doctor.sh [--json] [--time-limit SECONDS]
set -euo pipefail
# shellcheck source=profilers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! choose_python; then
    text="there is no $PYTHON here"
    remedy="install Python 3.10 or newer, or name one: PYTHON=/path/to/python profilers/doctor.sh"
    if [[ " $* " == *" --json "* ]]; then
        printf '{"findings": [{"probe": "python", "level": "FAIL", "text": "%s", "remedy": "%s"}], "counts": {"OK": 0, "WARN": 0, "FAIL": 1}}\n' "$text" "$remedy"
    else
        printf 'FAIL  python     %s\n                 %s\n' "$text" "$remedy"
    fi
    exit 1
fi
module_command doctor "$@"
exec "${COMMAND[@]}"
