#!/usr/bin/env bash
# Measures how well each kernel of a training step uses the GPU, in rocprof_compute/profile_<time>/: share of the peak
# (speed of light), occupancy, caches and memory. On AMD with rocprof-compute, on NVIDIA with ncu.
#
# Usage: ./get_rocprof_compute.sh [--kernels N] [--output DIR] [--stage N] [--tool NAME] [--dry-run]
#                                 [-- OPTIONS [-- OPTIONS]]
#
# The tools repeat the program or its kernels about ten times, so that a single step takes a few minutes. The options
# after a second -- are those of rocprof-compute profile or of ncu, such as -k rmsnorm_kernel.
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/profilers/python.sh"
exec "$PYTHON" -m profilers.record get_rocprof_compute.sh "$@"
