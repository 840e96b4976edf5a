#!/usr/bin/env bash
# A region of torch.autocast keeps the bf16 copies that it made of the weights. If the optimizer steps within the
# region, forward passes go on with the weights of the first step, and nothing says so.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys
from contextlib import nullcontext

import torch

torch.manual_seed(0)
inputs, targets = torch.randn(64, 8), torch.randn(64, 1)


def losses(region_per_step):
    """Return the losses of five steps, with a region of autocast around each or one around all."""
    layer = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    found = []
    region = torch.autocast("cpu", torch.bfloat16)
    around_all, around_each = (nullcontext(), region) if region_per_step else (region, nullcontext())
    with around_all:
        for _ in range(5):
            with around_each:
                loss = torch.nn.functional.mse_loss(layer(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


each, one = losses(True), losses(False)

as_stated = len(set(one)) == 1 and sorted(each, reverse=True) == each and each[-1] < each[0]
print("torch", torch.__version__)
print("expected:", "with one region around all steps, the loss falls as with one around each")
print("seen:    ", f"losses {one} with one, {each} with five")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
