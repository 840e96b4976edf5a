#!/usr/bin/env bash
# Replays the stages of the workshop, compares them and writes results/report.html; --help lists the options.
# Usage: [PYTHON=python3] ./run_all_stages.sh [--stages 2,4 | --beyond] [--dry-run] [-- options of tiny_llama_v3.py]
set -euo pipefail

die() {
    echo "run_all_stages.sh: error: $*" >&2
    exit 2
}

pwd -P >/dev/null 2>&1 || die "the current folder was deleted: change to another one"
here=$(dirname "${BASH_SOURCE[0]}")
python=${PYTHON:-$here/../../.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
command -v "$python" >/dev/null || die "there is no Python at PYTHON=$python: run make run at the top, or give another"
needed=(torch pandas matplotlib jinja2 tabulate)
"$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${needed[@]}" ||
    die "$python lacks one of ${needed[*]}: run make run at the top, or set PYTHON"
root=$(CDPATH='' cd "$here/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m exercises.performance_debugging.replay "$@"
