#!/usr/bin/env bash
# PyTorch converts an infinity to e4m3 as 448, its largest number, so that an overflow before the conversion is not
# seen any more. To e5m2 it converts 10^6, which is finite, as an infinity. ml_dtypes, which JAX uses, saturates in
# neither.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.5.4; } || exit 2

cat >check.py <<'END'
import sys

import ml_dtypes
import numpy
import torch

x = torch.tensor([1e6, torch.inf])
found = {}
for name in ("float8_e4m3fn", "float8_e5m2"):
    found[name, "torch"] = x.to(getattr(torch, name)).float().tolist()
    found[name, "ml_dtypes"] = x.numpy().astype(getattr(ml_dtypes, name)).astype(numpy.float32).tolist()

as_stated = str([*found.values()]) == "[[448.0, 448.0], [nan, nan], [inf, inf], [inf, inf]]"
print("torch", torch.__version__, "ml_dtypes", ml_dtypes.__version__)
print("expected:", "an infinity stays one, or becomes NaN in e4m3, which has none")
print("seen:    ", f"of 10^6 and infinity: {found}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
