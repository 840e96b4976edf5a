#!/usr/bin/env bash
# Measures how well each kernel of a training step uses the GPU, in rocprof_compute/profile_<time>/: share of the peak
# (speed of light), occupancy, caches and memory. Without rocprof-compute, it records times only.
#
# Usage: ./get_rocprof_compute.sh [--kernels N] [--operators] [--output DIR] [--stage N] [--tool NAME] [--dry-run]
#                                 [-- OPTIONS [-- OPTIONS]]
#
# The tool repeats the program about ten times, so that a single step takes a few minutes. The options after a second --
# are those of rocprof-compute profile, such as -k rmsnorm_kernel.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_rocprof_compute.sh "$@"
