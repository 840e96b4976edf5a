#!/usr/bin/env python3
"""Write text with a trained model.

    python sample.py --out_dir=out-pysource --start="def main" --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --max_new_tokens=100

Exit codes: 0 done, 2 the request cannot be met (one line says why), 130 interrupted, 141 the pipe of the output was
closed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

if __name__ == "__main__":  # not this folder, whose kernels would hide the library that transformers looks for
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from measure.command_line import program  # noqa: E402  (the repository must be on the path)
from nanogpt_triton import checkpoint  # noqa: E402
from nanogpt_triton.configurator import LARGEST, configure, setting  # noqa: E402
from nanogpt_triton.dataset import DATA, BytePairs, dataset_folder, fits, make_tokenizer, read_meta  # noqa: E402
from nanogpt_triton.model import GPT, GPT2_SIZES, GPTConfig  # noqa: E402
from nanogpt_triton.train import DTYPES, preferred_attention, select_device, select_dtype  # noqa: E402
from nanogpt_triton.train import Settings as TrainingSettings  # noqa: E402
from tiny_llama.hardware import is_out_of_memory  # noqa: E402
from tiny_llama_v3 import UsageError  # noqa: E402


@dataclass(frozen=True)
class Settings:
    init_from: str = setting("resume", "a checkpoint of ours, or OpenAI's weights", choices=("resume", *GPT2_SIZES))
    out_dir: str = setting("out", "folder of the checkpoint")
    data_dir: str = setting("", "where the folder of its dataset lies, if the checkpoint does not keep its characters")
    start: str = setting("\n", "the text to go on from, or FILE:name for that of a file", at_most=LARGEST)
    num_samples: int = setting(10, "texts", at_least=1)
    max_new_tokens: int = setting(500, "tokens of each", at_least=1)
    temperature: float = setting(0.8, "below 1 more predictable, above 1 more random", at_least=1e-3)
    top_k: int = setting(200, "draw from the most likely tokens only; 0: from all", at_least=0)
    seed: int = setting(1337, "of the draws", at_least=0, at_most=2**32 - 1)
    layer_norm: str = setting("auto", "whose code; auto: Triton's if it runs", choices=("auto", "triton", "torch"))
    device: str = setting("auto", "cpu, cuda, cuda:1, ..., mps; auto: cuda if there is one, otherwise cpu")
    dtype: str = setting("auto", "of autocast; auto: bfloat16 or float16 on a GPU", choices=("auto", *DTYPES))
    compile: bool = setting(False, "torch.compile the model")


def load_model(settings, device):
    """The model and the tokenizer of its data."""
    where = dict(layer_norm=settings.layer_norm, device=device)
    if settings.init_from != "resume":
        return GPT.from_pretrained(settings.init_from, **where), BytePairs()
    path = checkpoint.find(settings.out_dir, newest=False)
    state = checkpoint.load(path)
    tokenizer = make_tokenizer(meta_of(state, settings.data_dir, path))
    model = GPT(GPTConfig(**state["model_args"]), **where)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UsageError(f"{path} does not fit ({str(error).splitlines()[0]})") from error
    return model, tokenizer


def meta_of(state, data_dir, path):
    """What the tokens are: the checkpoint says so, or its dataset, or they are GPT-2's."""
    if "meta" in state and not data_dir:
        return state["meta"]
    config = {"dataset": "", "data_dir": ""} | state.get("config", {})
    dataset = str(config["dataset"])
    folder = dataset_folder(dataset, data_dir) if data_dir else Path(str(config["data_dir"]) or DATA) / dataset
    meta, vocab_size = read_meta(folder), state["model_args"]["vocab_size"]
    if not fits(meta, vocab_size):
        remedy = f"give --data_dir, where the folder {dataset} with its meta.json or meta.pkl lies"
        raise UsageError(f"{path} is for {vocab_size} tokens, and {folder} for {meta['vocab_size']}: {remedy}")
    checkpoint.check_data(state, dataset, data_dir, meta)
    return meta


def prompt(start):
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start.removeprefix("FILE:")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"start={start:.200} cannot be read ({reason}): give a text file") from error


def sample(settings):
    torch.set_float32_matmul_precision("high")
    device = select_device(settings.device, 0, 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model, tokenizer = load_model(settings, device)
    model.eval()
    forward = torch.compile(model) if settings.compile else model
    tokens = tokenizer.encode(prompt(settings.start))
    if not tokens:
        raise UsageError("start is empty: give at least one character")
    tokens = torch.tensor([tokens], device=device)
    torch.manual_seed(settings.seed)
    dtype = select_dtype(settings.dtype, device)
    with preferred_attention(device, False), torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32"):
        for _ in range(settings.num_samples):
            text = model.generate(tokens, settings.max_new_tokens, settings.temperature, settings.top_k, forward)
            print(tokenizer.decode(text[0].tolist()))
            print("---------------", flush=True)


@program("sample.py")
def main(argv):
    settings, _ = configure(Settings, argv, __doc__, TrainingSettings.__dataclass_fields__)
    try:
        sample(settings)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = "give another device, or a smaller model"
        raise UsageError(f"out of memory on device={settings.device}: {remedy}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
