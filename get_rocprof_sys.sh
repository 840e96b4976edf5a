#!/usr/bin/env bash
# Samples the call stacks of a training run or of any program beside its GPU activity. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_rocprof_sys.sh "$@"
