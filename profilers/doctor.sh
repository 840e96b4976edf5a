#!/usr/bin/env bash
# Reports what prevents the project from running well on this machine, and the remedies. Run it first.
# Usage: [PYTHON=python3] profilers/doctor.sh
set -euo pipefail
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec "$PYTHON" -m profilers.doctor "$@"
