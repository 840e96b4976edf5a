#!/usr/bin/env bash
# Records every kernel of a training run or of any program, and with --pmc hardware counters. --help lists the options.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_counters.sh "$@"
