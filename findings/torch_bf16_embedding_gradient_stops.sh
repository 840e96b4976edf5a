#!/usr/bin/env bash
# On a CPU, the gradient of an embedding in bf16 is added up in bf16, one token after the other: a token that occurs
# 1000 times gets 256, where the next 1 is rounded away. sum() and the gradients of gather and expand are right.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6; } || exit 2

cat >check.py <<'END'
import sys

import torch

tokens = torch.zeros(1000, dtype=torch.long)


def gradient(look_up):
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    look_up(weight).sum().backward()
    return weight.grad.item()


found = {
    "embedding": gradient(lambda weight: torch.nn.functional.embedding(tokens, weight)),
    "weight[tokens]": gradient(lambda weight: weight[tokens]),
    "gather": gradient(lambda weight: weight.gather(0, tokens[:, None])),
    "expand": gradient(lambda weight: weight.expand(1000, 1)),
}

as_stated = list(found.values()) == [256, 256, 1000, 1000]
print("torch", torch.__version__)
print("expected:", "a gradient of 1000")
print("seen:    ", found)
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
