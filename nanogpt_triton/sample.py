#!/usr/bin/env python3
"""Write text with a trained model.

    python sample.py --out_dir=out-pysource --start="def main" --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --max_new_tokens=100

It takes the keys of train.py as well, of which device, dtype, layer_norm, seed, out_dir and data_dir count here.

Exit codes: 0 done, 2 the request cannot be met (one line says why), 130 interrupted, 141 the pipe of the output was
closed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

if __name__ == "__main__":  # not this folder, whose kernels would hide the library that transformers looks for
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from measure.command_line import printable, program  # noqa: E402  (the repository must be on the path)
from nanogpt_triton import checkpoint, train  # noqa: E402
from nanogpt_triton.configurator import Count, configure  # noqa: E402
from nanogpt_triton.dataset import DATA, BytePairs, make_tokenizer, read_text, read_texts, reading  # noqa: E402
from nanogpt_triton.model import GPT, GPT2_SIZES  # noqa: E402
from nanogpt_triton.train import preferred_attention, select_device, select_dtype  # noqa: E402


@dataclass(frozen=True)
class Settings(train.Settings):
    init_from: Literal[("resume", *GPT2_SIZES)] = "resume"  # a checkpoint in out_dir, or OpenAI's weights
    start: str = "\n"  # the text to go on from, or FILE:name for that of a file
    num_samples: Count = 10  # texts
    max_new_tokens: Count = 500  # of each
    temperature: float = 0.8  # below 1 more predictable, above 1 more random
    top_k: int = 200  # draw from the most likely tokens only; 0: from all
    compile: bool = False  # torch.compile the model


def load_model(settings, device):
    """Return the model and the tokenizer of its data."""
    where = settings.layer_norm, device
    if settings.init_from != "resume":
        return GPT.from_pretrained(settings.init_from, None, *where), BytePairs()
    path = checkpoint.find(settings.out_dir, newest=False)
    state = checkpoint.load(path)
    if "meta" in state:
        texts = checkpoint.texts_of(state)
    else:  # nanoGPT's, which names the folder of its data
        texts = read_texts(Path(settings.data_dir or DATA, state.get("config", {}).get("dataset", "")))
        checkpoint.check_tokens(state, texts)
    model = GPT(state["model_args"], *where)
    with reading(path, "give another out_dir"):
        model.load_state_dict(state["model"])
    return model, make_tokenizer(texts)


@program("sample.py")
def main(argv):
    settings = configure(Settings, argv, __doc__)
    torch.set_float32_matmul_precision("high")
    device = select_device(settings.device, 0, 1)
    model, tokenizer = load_model(settings, device)
    model.eval()
    if settings.compile:
        model.compile()
    start = settings.start
    if start.startswith("FILE:"):
        start = read_text(start.removeprefix("FILE:"))
    tokens = torch.tensor([tokenizer.encode(start or "\n")], device=device)
    torch.manual_seed(settings.seed)
    dtype = select_dtype(settings.dtype, device)
    with preferred_attention(device, False), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for _ in range(settings.num_samples):
            text = model.generate(tokens, settings.max_new_tokens, settings.temperature, settings.top_k)
            print(printable(tokenizer.decode(text[0].tolist())))
            print("---------------", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
