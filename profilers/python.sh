# shellcheck shell=bash
# Sourced by the scripts that are programs of profilers/: sets ROOT, and PYTHON, an absolute path, as requested, of the
# project, or of the system, and lets them be started from any folder.

# die MESSAGE [STATUS]
die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$1" >&2
    exit "${2:-2}"
}

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x $ROOT/.venv/bin/python ]] || PYTHON=$ROOT/.venv/bin/python
fi
command -v "$PYTHON" >/dev/null || die "there is no Python at PYTHON=$PYTHON: run make run, or give another"
# Absolute, as rocprof-compute of ROCm 6 does not search the PATH and changes the folder.
PYTHON=$(command -v "$PYTHON")
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$PYTHON is not Python 3.10 or newer: make run PYTHON=/path/to/python, or load a newer module"
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
