#!/usr/bin/env bash
# Records the timeline of a training run or of any program for Perfetto. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_trace.sh "$@"
