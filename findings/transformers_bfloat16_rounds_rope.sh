#!/usr/bin/env bash
# model.bfloat16() of transformers' LLaMA also rounds the frequencies of the rotary embedding, a buffer: at position
# 4000 cosines are wrong by 0.7. from_pretrained(dtype=torch.bfloat16) keeps them in fp32.
# Exit codes: 0 it is as stated, 1 it has changed, 2 the packages could not be installed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ python3 -m venv venv && venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0; } || exit 2

cat >check.py <<'END'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
model.save_pretrained("model")
position = torch.tensor([[4000]])


def cosines(model):
    return model.model.rotary_emb(torch.zeros(1, 1, 128), position)[0]


right = cosines(model)
loaded = (cosines(LlamaForCausalLM.from_pretrained("model", dtype=torch.bfloat16)) - right).abs().max().item()
converted = (cosines(model.bfloat16()) - right).abs().max().item()

as_stated = converted > 0.5 and loaded < 0.005
print("transformers", transformers.__version__, "torch", torch.__version__)
print("expected:", "the same angles from both")
print("seen:    ", f"worst error of a cosine at position 4000: converted {converted:.3f}, loaded {loaded:.3f}")
print("as stated" if as_stated else "changed")
sys.exit(not as_stated)
END
venv/bin/python -W ignore check.py
