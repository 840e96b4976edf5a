#!/usr/bin/env bash
# Samples the call stacks of a whole training run beside its GPU activity, clocks and power, and in a second run the
# time of each Python function, in rocprof_sys/profile_<time>/.
#
# Usage: ./get_rocprof_sys.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
#
# The options after a second -- are those of rocprof-sys-sample, such as -f 1000 or -E rcclp.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_rocprof_sys.sh "$@"
