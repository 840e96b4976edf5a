#!/usr/bin/env bash
# Records every kernel of a training run, and with --pmc hardware counters, in counters/counter_<time>/.
#
# Usage: ./get_counters.sh [--pmc [NAME...]]... [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_counters.sh "$@"
