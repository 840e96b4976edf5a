#!/usr/bin/env bash
# torch.compile takes a conversion to bf16 and back for nothing, and keeps what lies between operations on bf16 in
# fp32. Code that rounds on purpose rounds no more.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export TORCHINDUCTOR_CACHE_DIR=$folder
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys

import torch


def rounded(x):
    return x.to(torch.bfloat16).to(torch.float32)


def small_term(x):
    return x + 1 - x


x = torch.full((64,), 1 + 2**-12)
large = torch.full((64,), 256.0, dtype=torch.bfloat16)
eager = rounded(x)[0].item(), small_term(large)[0].item()
compiled = torch.compile(rounded)(x)[0].item(), torch.compile(small_term)(large)[0].item()

as_stated = eager == (1, 0) and compiled == (1 + 2**-12, 1)
print("torch", torch.__version__)
print("expected:", "compiled code computes what eager code does")
print("seen:    ", f"1 + 2^-12 through bf16 and 256 + 1 - 256 in bf16: eager {eager}, compiled {compiled}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
