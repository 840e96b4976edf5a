#!/usr/bin/env bash
# Makes .venv and installs requirements.txt. A .venv that imports torch is kept, whoever made it, and so is a torch that
# PYTHON imports. Without one, a machine with an AMD GPU, or with ROCm and no NVIDIA GPU, gets torch for its release of
# ROCm, another one torch from pip's own index; but not in place of a torch outside of .venv that has gone, such as that
# of a module that is not loaded. A .venv that cannot be used is renamed, never deleted.
# Usage: [PYTHON=python3] [TORCH_INDEX=https://download.pytorch.org/whl/cpu] site/setup_env.sh
# Exit codes: 0 .venv is ready, 2 the request cannot be met, another one is pip's.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

die() {
    echo "setup_env.sh: $*" >&2
    exit 2
}

(($# == 0)) || die "$1 is not an option: what can be set stands at the top of this file. Nothing was changed"

# What pip is told for other environments would install elsewhere, or end it.
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT

# An activated .venv must not become its own parent.
own_bin=$(pwd -P)/.venv/bin:
PATH=${PATH//"$own_bin"/}
parent=${PYTHON:-python3}
python=.venv/bin/python
outside=.venv/torch_outside.txt # if torch is not in .venv: where it is, and the modules that were loaded
: "${KFD_DEVICE:=/dev/kfd}" "${NVIDIA_DEVICE:=/dev/nvidiactl}" "${WSL_DEVICE:=/dev/dxg}" "${NVIDIA_SMI:=nvidia-smi}"

"$parent" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "PYTHON=$parent is not Python 3.10 or newer"

imports() { "$1" -c "import $2" 2>/dev/null; }
requirement() { grep -E "^$1[<>=;]" requirements.txt; }
number() { echo $((10#${1%%.*} * 100 + 10#${1#*.})); } # 714 of 7.14; 10#, as 08 would be octal

# Windows's driver, which serves WSL, has one file for GPUs of all makes; nvidia-smi comes with NVIDIA's.
has_nvidia() {
    [[ -e $NVIDIA_DEVICE ]] ||
        { [[ -e $WSL_DEVICE ]] && PATH=$PATH:/usr/lib/wsl/lib command -v "$NVIDIA_SMI" >/dev/null; }
}

# Sets TORCH_INDEX, and the array wanted: what to install from it.
choose_wheels() {
    local release known index=6.4 devices=''
    wanted=("$(requirement torch)")
    release=$("$parent" -c 'from profilers.rocm import release_here; print(release_here())')
    if [[ -n ${TORCH_INDEX:-} ]]; then
        : # given
    elif [[ -e $KFD_DEVICE ]] || { [[ -n $release ]] && ! has_nvidia; }; then # a login node has ROCm, and no GPU
        # PyTorch's own: the newest that is not newer than this ROCm, so that its driver and its profilers fit.
        for known in 7.0 7.1 7.2 7.14; do
            (($(number "$known") > $(number "${release:-7.2}"))) || index=$known
        done
        TORCH_INDEX=https://download.pytorch.org/whl/rocm$index
        if (($(number "${release:-7.2}") >= 1000)); then # only AMD has these
            TORCH_INDEX=https://stable.repo.amd.com/rocm/whl-next/ wanted+=("rocm==$release.*")
        fi
        echo "This machine has ${release:+ROCm }${release:-an AMD GPU}: torch comes from $TORCH_INDEX"
    elif [[ $(uname) == Linux ]] && ! has_nvidia; then # or a login node of a cluster
        echo "There is no GPU of NVIDIA, and torch brings some 3 GB of CUDA libraries. To do without them, press Ctrl-C"
        echo "and give the target TORCH_INDEX=https://download.pytorch.org/whl/cpu"
        [[ ! -e $WSL_DEVICE ]] || echo "or, for an AMD GPU under WSL, ROCm's index (docs/rocm.md, Install)"
    fi
    case ${TORCH_INDEX:-} in
    *.amd.com/* | */rocm7.14*) wanted[0]="${wanted[0]%,*},<2.15" ;; # ROCm 7.14 and 10.1 have no older one
    esac
    if [[ ${TORCH_INDEX:-} == *.amd.com/* ]]; then # where each architecture's code is a package of its own
        devices=$("$parent" -c 'from profilers.rocm import architectures
print(*(f"device-{name}" for name in architectures()), sep=",")')
        wanted[0]=${wanted[0]/torch/torch[${devices:-device-all}]}
    fi
}

# make_venv OPTIONS: a new .venv. The old one, if there is one, gets the next free name.
make_venv() {
    local old=.venv.old number=1
    while [[ -e $old || -L $old ]]; do number=$((number + 1)) old=.venv.old$number; done
    if [[ -e .venv || -L .venv ]]; then
        mv .venv "$old"
        echo "The .venv that was here is now $old: delete it if nothing in it is yours"
    fi
    "$parent" -m venv "$@" .venv
}

# make_venv_on_parent OPTIONS: one that has the packages of PYTHON too.
make_venv_on_parent() {
    make_venv --system-site-packages "$@"
    # The packages of a parent that is a venv itself are not among the system's: add them by a .pth file.
    "$parent" -c 'import site, sys
if sys.prefix != sys.base_prefix:
    for path in site.getsitepackages([sys.prefix]):
        print(f"import site; site.addsitedir({path!r})")' >.venv/parent.pth
    mv .venv/parent.pth "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
}

usable= # whether .venv has an interpreter, and is where it was made
if "$python" -c '' 2>/dev/null && grep -qsF -e "$PWD/.venv" -e "$(pwd -P)/.venv" .venv/bin/activate; then usable=1; fi
has_torch= # whether PYTHON has
if [[ -n $usable ]] && imports "$python" torch; then
    : # kept
elif imports "$parent" torch; then
    usable='' has_torch=1
elif [[ -e $outside ]]; then
    { read -r torch && read -r modules; } <$outside
    remedy="set PYTHON and PYTHONPATH as they were"
    [[ -z $modules ]] || remedy="module load ${modules//:/ }"
    die "this .venv builds on $torch, which Python no longer finds: $remedy, or make clean to start anew"
else
    choose_wheels
fi
if [[ -n $usable ]]; then
    imports "$python" pip || "$python" -m ensurepip >/dev/null || die "make .venv with pip, as uv venv --seed does"
elif ! imports "$parent" 'venv, ensurepip'; then # as in Colab, and in PyTorch's own containers: PYTHON lends its pip
    imports "$parent" 'venv, pip' ||
        die "$parent cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"
    make_venv_on_parent --without-pip
elif [[ -n $has_torch ]]; then
    make_venv_on_parent
else
    make_venv
fi
# Asked alone, the index cannot lose against a higher version elsewhere.
[[ -z ${wanted[0]:-} ]] ||
    "$python" -m pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${wanted[@]}" ||
    die "pip could not install ${wanted[*]}, see above; TORCH_INDEX=URL names another index (docs/rocm.md, Install)"

"$python" -c 'import os, sys, torch
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version
print(f"torch {torch.__version__} from {torch.__file__}")
outside = Path(sys.argv[2])
if Path(torch.__file__).is_relative_to(sys.prefix):
    outside.unlink(missing_ok=True)
else:
    outside.write_text(torch.__file__ + "\n" + os.environ.get("LOADEDMODULES", "") + "\n")
if Version(torch.__version__).base_version not in Requirement(sys.argv[1]).specifier:
    print(f"setup_env.sh: warning: torch {torch.__version__} is kept; tested is {sys.argv[1]}", file=sys.stderr)
' "${wanted[0]:-$(requirement torch)}" "$outside"

# ROCm's PyTorch has a triton of its own, under another name: pip would put PyPI's beside it.
if ! imports "$python" triton && "$python" -c 'import sys, torch; sys.exit(torch.version.hip is not None)'; then
    "$python" -m pip install "$(requirement triton)"
fi

# No dependency may replace torch or triton: each is pinned, or shut out if it goes by another name.
{
    for name in torch triton; do
        "$python" -m pip list --format=freeze | grep "^$name==" || echo "$name<0"
    done
    # Up to 3.6, Triton's interpreter calls range() on 1-element arrays, which numpy 2.4 refuses.
    if "$python" -c 'import sys, triton; sys.exit([*map(int, triton.__version__.split(".")[:2])] > [3, 6])' 2>/dev/null; then
        echo 'numpy<2.4'
    fi
} >.venv/constraints.txt

# What is installed by hand later must heed them too. A file:// address, for pip splits a path at its blanks. pip keeps
# what else its file contains.
address=$("$python" -c 'import pathlib, sys; print(pathlib.Path(sys.prefix, "constraints.txt").as_uri())')
env -u PIP_CONFIG_FILE "$python" -m pip config --quiet --site set global.constraint "$address"

# Named again, for a container's PIP_CONSTRAINT takes the place of pip.conf's.
grep -vE '^(torch|triton)[<>=;]' requirements.txt >.venv/requirements.txt
"$python" -m pip install -c .venv/constraints.txt -r .venv/requirements.txt
