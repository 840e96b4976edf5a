#!/usr/bin/env bash
# Ranks the kernels of a training run by the time that they take, in hotspots/hotspot_<time>/.
#
# Usage: ./get_hotspots.sh [--output DIR] [--stage N] [--tool NAME] [--dry-run] [-- OPTIONS [-- OPTIONS]]
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_hotspots.sh "$@"
