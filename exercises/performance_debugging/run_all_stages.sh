#!/usr/bin/env bash
# Replays the stages of the workshop, compares them and writes results/report.html; --help lists the options.
# Usage: [PYTHON=python3] ./run_all_stages.sh [--stages 2,4 | --beyond] [--dry-run] [-- options of tiny_llama_v3.py]
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
python=${PYTHON:-$here/../../.venv/bin/python}
command -v "$python" >/dev/null || python=python3
needed=(torch pandas matplotlib jinja2)
"$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${needed[@]}" || {
    echo "run_all_stages.sh: error: $python lacks one of ${needed[*]}: run make at the top, or set PYTHON" >&2
    exit 2
}
exec "$python" "$here/replay.py" "$@"
