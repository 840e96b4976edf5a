#!/usr/bin/env bash
# Makes .venv anew and installs requirements.txt; a torch that PYTHON already imports is used as it is.
# Usage: [PYTHON=python3] [TORCH_INDEX=https://download.pytorch.org/whl/cpu] ./setup_env.sh
set -euo pipefail
cd "$(dirname "$0")"

die() {
    echo "setup_env.sh: $*" >&2
    exit 1
}

# An activated .venv must not become its own parent.
own_bin=$(pwd -P)/.venv/bin:
PATH=${PATH//"$own_bin"/}
parent=${PYTHON:-python3}
python=.venv/bin/python

"$parent" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "PYTHON=$parent is not Python 3.10 or newer"
"$parent" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$parent cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"

imports() { "$1" -c "import $2" 2>/dev/null; }

if imports "$parent" torch; then
    "$parent" -m venv --clear --system-site-packages .venv
    # The packages of a parent that is a venv itself are not among the system's: add them by a .pth file.
    "$parent" -c 'import site, sys
if sys.prefix != sys.base_prefix:
    for path in site.getsitepackages([sys.prefix]):
        print(f"import site; site.addsitedir({path!r})")' >.venv/parent.pth
    mv .venv/parent.pth "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
else
    "$parent" -m venv --clear .venv
    # Asked alone, the index cannot lose against a higher version elsewhere.
    if [ -n "${TORCH_INDEX:-}" ]; then
        "$python" -m pip install --index-url "$TORCH_INDEX" "$(grep '^torch' requirements.txt)"
    fi
fi

# The ROCm wheels name their triton differently: pip would put PyPI's triton beside it.
keep=
if imports "$python" torch; then
    keep=torch
    "$python" -c 'import torch; print(f"Keeping torch {torch.__version__} from {torch.__file__}")'
    if imports "$python" triton || "$python" -c 'import sys, torch; sys.exit(torch.version.hip is None)'; then
        keep='torch|triton'
    fi
fi

# No dependency may replace what is kept: it is pinned, or shut out if it goes by another name.
for name in ${keep//|/ }; do
    "$python" -m pip list --format=freeze | grep "^$name==" || echo "$name<0"
done >.venv/constraints.txt
grep -vE "^(${keep:-none})[<>=;]" requirements.txt >.venv/requirements.txt
"$python" -m pip install -c .venv/constraints.txt -r .venv/requirements.txt
