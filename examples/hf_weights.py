"""Train a LLaMA in Hugging Face's format, after comparing our model of it with that of the library transformers.

    python -m examples.hf_weights FOLDER
    python -m examples.hf_weights FOLDER --text FILE --num-steps 100 --output NEW_FOLDER

FOLDER contains config.json and *.safetensors, as save_pretrained() and `hf download NAME --local-dir FOLDER` write
them. First the logits of both models are compared, in fp32. Then this is a run of

    python tiny_llama_v3.py --init-from FOLDER --data FILE.bin --save NEW_FOLDER

where FILE.bin has the tokens of --text by the folder's tokenizer; without --text, the tokens are random. The files of
the tokenizer and the licence come along. There is no network, and no code that lies in the folder is run.

Exit codes: 0 done, 1 the logits differ, or the loss is not finite, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

if not __package__:
    print("run it from the root as python -m examples.hf_weights", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.command_line import Parser, UsageError, positive, program, replacing, require_file
from measure.results import describe, import_library
from tiny_llama import checkpoint, hardware
from tiny_llama.data import token_type
from tiny_llama.files import open_input

# Of the logits, relative to the largest. transformers has the angles of rotary embedding in fp32, ours are from fp64:
# at position 2,048 this alone makes 6e-5.
TOLERANCE = 1e-4
# What comes along to --output: the tokenizer's files and others of generation, the licence. No weights, and no code.
BESIDE = "*.json *.jinja *.md *.model *.spm *.tiktoken *.txt *.vocab *token* LICENSE* NOTICE*".split()
BESIDE += ["additional_chat_templates/*.jinja"]
NOT_BESIDE = "config.json *.index.json *.bin *.pt *.pth *.py *.pyc *.safetensors *.so".split()
# Of config.json, what the script does not know: it trains on shorter sequences than a model may see.
KEPT = "bos_token_id eos_token_id pad_token_id max_position_embeddings".split()


@contextlib.contextmanager
def reported(what, done="read"):
    """Turn whatever a library raises into UsageError."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{what} cannot be {done} ({describe(error)})") from error


def import_transformers(folder):
    """Return the library transformers, for a folder in which there is nothing that it would wait for."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give one with a whole LLaMA")
    for path in folder.iterdir():
        path.is_dir() or require_file(path)
    with reported("transformers", "imported"):
        transformers = import_library("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it would warn of is refused
    return transformers


def read_beside(folder):
    """Return {path in the folder: bytes} of what comes along, so that saving needs the folder no more."""
    contents = {}
    for path in {path for pattern in BESIDE for path in folder.glob(pattern)}:
        if path.is_dir() or any(path.match(pattern) for pattern in NOT_BESIDE):
            continue
        with reported(path), open_input(path) as file:
            contents[path.relative_to(folder)] = file.read()
    return contents


def write_tokens(text, folder, config, transformers):
    """Write the tokens of a text, by the tokenizer of a folder, to the file of config.data."""
    with reported(f"--text {text} or the tokenizer of {folder}"), open_input(text) as file:
        # A folder's Python is not run whatever its files ask for, and what it lacks is not looked for elsewhere.
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Not verbose: it would warn of a text that is longer than the model's context, of which windows are taken.
        tokens = np.array(tokenizer(file.read().decode(), verbose=False).input_ids, dtype=np.int64)
    beyond = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if len(beyond):
        known = f"the tokenizer of {folder} gives token {beyond[0]}, and its model has {config.vocab_size}"
        raise UsageError(f"--text {text}: {known}: resize the model's embeddings, or leave such words out")
    tokens.astype(token_type(config)).tofile(config.data)


@torch.no_grad()
def same_logits(config, device, folder, transformers):
    """Return whether our model has the logits of transformers'; print by how much they differ."""
    step = llama.TrainStep(config, device)
    step.load(*next(llama.batches(config)))
    with reported(folder):
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder,
            attn_implementation="sdpa",  # a name of config.json may be that of code in Hugging Face's hub
            use_safetensors=True,
            local_files_only=True,
        )
    expected = model.float().to(device)(step.tokens).logits
    difference = ((step.model(step.tokens) - expected).abs().max() / expected.abs().max()).item()
    print(f"The logits differ from those of transformers by {difference:.1e} (allowed: {TOLERANCE})", flush=True)
    return difference <= TOLERANCE


def complete(output, given, beside):
    """Make a folder that --save has written one that others use: no optimizer, but what was beside the weights."""
    (output / checkpoint.TRAINING).unlink()
    written = json.loads((output / checkpoint.CONFIG).read_text())
    written |= {name: given[name] for name in KEPT if name in given}
    for path, content in (beside | {Path(checkpoint.CONFIG): json.dumps(written, indent=2).encode()}).items():
        with replacing(output / path) as file:
            file.write_bytes(content)


def parse(argv):
    """Return {option: value} of a command line."""
    parser = Parser("hf_weights", __doc__)
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text (default: random tokens)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="save the trained model in a new folder")
    for flag, kind, default, help in (
        ("--num-steps", positive, 10, "training steps"),
        ("--batch-size", positive, 1, "sequences a step"),
        ("--seq-len", positive, 128, "tokens a sequence"),
        ("--learning-rate", float, 1e-5, "AdamW's"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=f"{help} (default: {default})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    return vars(parser.parse_args(argv))


@program("hf_weights")
def main(argv):
    options = parse(argv)
    folder, text, output = (options.pop(name) for name in ("folder", "text", "output"))
    if output:
        if os.path.lexists(output):
            raise UsageError(f"--output {output} exists: give the name of a new folder")
        llama.writable_folder("--output", output.absolute().parent)
    transformers, beside = import_transformers(folder), read_beside(folder) if output else {}
    with tempfile.TemporaryDirectory() as scratch:
        flags = {"init_from": folder, "data": Path(scratch, f"{text.name}.bin") if text else "random", **options}
        argv = [f"{llama.flag_of(name)}={value}" for name, value in flags.items()]
        config = llama.parse_config(argv, "hf_weights")
        device, given = llama.select_device(config.device), checkpoint.read_json(folder / checkpoint.CONFIG, "FOLDER")
        if text:
            write_tokens(text, folder, config, transformers)
        hardware.remedied(config, hardware.require_host_memory, device)
        hardware.require_gpu_memory(config, device)
        if not hardware.remedied(config, same_logits, device, folder, transformers):
            return 1
        gc.collect()  # frees both models
        exit_code = llama.main([*argv, f"--save={output}"] if output else argv, "hf_weights")
    if output and (output / checkpoint.MODEL).exists():
        complete(output, given, beside)
    return exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    sys.exit(main())
