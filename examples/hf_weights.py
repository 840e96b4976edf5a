"""Load a LLaMA in Hugging Face's format into our model, train it for some steps, and save it in the same format.

    python -m examples.hf_weights FOLDER
    python -m examples.hf_weights FOLDER --text FILE --num-steps 100 --output NEW_FOLDER

FOLDER contains config.json and *.safetensors, as save_pretrained() and `hf download NAME --local-dir FOLDER` write
them. The library transformers reads and writes it, without a network, and no code that lies in the folder is run. The
logits are compared with those of its model before training, which is in fp32. --text is read by the folder's tokenizer;
without it, the tokens are random.

Exit codes: 0 done, 1 the logits differ, or the loss is not finite, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import os
import shutil
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
from tiny_llama import hardware
from tiny_llama.data import as_batch, windows_of
from tiny_llama.files import open_input
from tiny_llama.hugging_face_weights import HF_SIZES, copy_to_hugging_face, from_hugging_face

# Of the logits, relative to the largest. transformers has the angles of rotary embedding in fp32, ours are from fp64:
# at position 2,048 this alone makes 6e-5.
TOLERANCE = 1e-4
# What our model computes: fields of config.json that must be so, or missing. Keys of weights that are missing or too
# many would be random, or ignored.
SUPPORTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "is_causal": True,
    "quantization_config": None,
    "rope_type": "default",
    "missing_keys": set(),
    "unexpected_keys": set(),
}
# What comes along to --output: the tokenizer's files and others of generation, the licence. No weights, and no code.
BESIDE = "*.json *.jinja *.md *.model *.spm *.tiktoken *.txt *.vocab *token* LICENSE* NOTICE*".split()
BESIDE += ["additional_chat_templates/*.jinja"]
NOT_BESIDE = "config.json *.index.json *.bin *.pt *.pth *.py *.pyc *.safetensors *.so".split()
# A folder's Python is not run whatever its files ask for, and what it lacks is not looked for elsewhere.
LOCAL = dict(trust_remote_code=False, local_files_only=True)


@contextlib.contextmanager
def reported(what, done="read"):
    """Turn whatever is raised into UsageError. It names what config.json has by its keys, not by the script's flags."""
    try:
        yield
    except Exception as error:
        text = describe(error)
        for ours, theirs in HF_SIZES.items():
            text = text.replace(llama.flag_of(ours), theirs)
        raise UsageError(f"{what} cannot be {done} ({text})") from error


def refuse_unsupported(folder, given):
    """Raise UsageError for the first of these facts, a dict, that our model cannot compute."""
    for name, value in SUPPORTED.items():
        if given.get(name, value) not in (value, None):
            raise UsageError(f"{folder}: {name} is {given[name]!r}, and only {value!r} is supported")


def read_config(folder):
    """Return the LlamaConfig of a folder, without its weights."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give one with a whole LLaMA")
    for path in folder.iterdir():
        path.is_dir() or require_file(path)
    with reported("transformers", "imported"):
        transformers = import_library("transformers")
    with reported(folder):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # what it would warn of is refused
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    given = config.to_dict()
    refuse_unsupported(folder, given | (given.get("rope_parameters") or {}))
    return config


def load(folder, config):
    """Return the LlamaForCausalLM of a folder, in fp32; UsageError if our model cannot compute it."""
    with reported(folder):
        from transformers import LlamaForCausalLM

        model, found = LlamaForCausalLM.from_pretrained(
            folder,
            config=config,
            attn_implementation="sdpa",  # a name of config.json may be that of code in Hugging Face's hub
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
        )
    refuse_unsupported(folder, found)
    # Where the file has another head, transformers does not tie it.
    if config.tie_word_embeddings != (model.lm_head.weight is model.model.embed_tokens.weight):
        raise UsageError(f"{folder}: tie_word_embeddings is true beside another lm_head.weight: make it false")
    return model.float()


def read_beside(folder):
    """Return {path in the folder: bytes} of the files that BESIDE names, so that saving needs the folder no more."""
    contents = {}
    for path in {path for pattern in BESIDE for path in folder.glob(pattern)}:
        if path.is_dir() or any(path.match(pattern) for pattern in NOT_BESIDE):
            continue
        with reported(path), open_input(path) as file:
            contents[path.relative_to(folder)] = file.read()
    return contents


def text_batches(path, folder, config):
    """Yield batches as llama.random_tokens() does, of random windows of a text, the same in every run."""
    with reported(f"--text {path} or the tokenizer of {folder}"), open_input(path) as file:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        # Not verbose: it would warn of a text that is longer than the model's context, of which windows are taken.
        tokens = np.array(tokenizer(file.read().decode(), verbose=False).input_ids)
    if len(tokens) <= config.seq_len:
        raise UsageError(f"--text {path} has {len(tokens)} tokens, and --seq-len {config.seq_len} needs more")
    if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        beyond = tokens[(tokens < 0) | (tokens >= config.vocab_size)][0]
        known = f"the tokenizer of {folder} gives token {beyond}, and its model has {config.vocab_size}"
        raise UsageError(f"--text {path}: {known}: resize the model's embeddings, or leave such words out")
    windows, rng = windows_of(tokens, config), np.random.default_rng(config.seed)
    while True:
        yield as_batch(windows[rng.integers(len(windows), size=config.batch_size)])


def make_step(config, device, model):
    """Return a TrainStep that starts from the weights of a LlamaForCausalLM."""
    step = llama.TrainStep(config, device)
    names = [name for name, _ in step.model.named_parameters()]
    step.load_state_dict(from_hugging_face(model.state_dict(), names))
    return step


@torch.no_grad()
def same_logits(step, model):
    """Return whether our model has the logits of transformers'; print by how much they differ."""
    # The model of transformers is on the device only for this: training needs the memory.
    expected = model.to(step.device.type)(step.tokens).logits
    model.cpu()
    difference = ((step.model(step.tokens) - expected).abs().max() / expected.abs().max()).item()
    print(f"The logits differ from those of transformers by {difference:.1e} (allowed: {TOLERANCE})")
    return difference <= TOLERANCE


def save(step, model, beside, output):
    """Write the trained weights, and what was beside them, {path: bytes}, to a new folder."""
    copy_to_hugging_face(dict(step.model.named_parameters()), model)
    if Path("generation_config.json") in beside:
        model.generation_config = type(model.generation_config)()  # that of the folder may be one that is not saved
    model.config.rope_theta = model.config.rope_parameters["rope_theta"]  # where transformers 4 looks for it
    with replacing(output) as new, reported(f"--output {output}", "written"):
        model.save_pretrained(new)
        for path, content in beside.items():
            (new / path).parent.mkdir(exist_ok=True)
            (new / path).write_bytes(content)
        for path in new.glob("*.safetensors"):
            shutil.copymode(new / "config.json", path)  # safetensors 0.8 hides it from the group


def save_somewhere(step, model, beside, output):
    """Write to output, or where else there is room: UsageError then says where the trained model is."""
    places, reasons = [output, *(Path(place, f"hf_weights_{os.getpid()}") for place in spare_folders())], []
    for place in places:
        try:
            save(step, model, beside, place)
        except UsageError as error:
            reasons.append(str(error))
        else:
            break
    else:
        raise UsageError("; ".join(reasons))
    if reasons:
        raise UsageError(f"{reasons[0]}: the trained model is in {place}")


def spare_folders():
    """Yield folders that the user may write to."""
    with contextlib.suppress(OSError):  # no place for temporary files
        yield tempfile.gettempdir()
    with contextlib.suppress(OSError, RuntimeError):
        yield Path.home()
        yield Path.cwd()


def run(config, device, given, folder, text, output):
    """Load, compare, train and save. Return the exit code."""
    model, beside = load(folder, given), read_beside(folder) if output else {}
    batches = text_batches(text, folder, config) if text else llama.random_tokens(config)
    step, records = make_step(config, device, model), []
    step.load(*next(batches))
    if not same_logits(step, model):
        return 1
    llama.print_configuration(step)
    llama.train(step, batches, records)
    if llama.divergence(records):
        return 1
    if output:
        save_somewhere(step, model, beside, output)
    return 0


@program("hf_weights")
def main(argv):
    parser = Parser("hf_weights", __doc__)
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text (default: random tokens)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="save the trained model in a new folder")
    for flag, kind, default, text in (
        ("--num-steps", positive, 10, "training steps"),
        ("--batch-size", positive, 1, "sequences a step"),
        ("--seq-len", positive, 128, "tokens a sequence"),
        ("--learning-rate", float, 1e-5, "AdamW's"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    options = vars(parser.parse_args(argv))
    folder, text, output = (options.pop(name) for name in ("folder", "text", "output"))
    if output:
        if os.path.lexists(output):
            raise UsageError(f"--output {output} exists: give the name of a new folder")
        llama.writable_folder("--output", output.absolute().parent)
    given, device = read_config(folder), llama.select_device(options["device"])
    with reported(folder / "config.json"):
        config = llama.Config(
            **{ours: getattr(given, theirs) for ours, theirs in HF_SIZES.items()},
            rope_theta=float(given.rope_parameters["rope_theta"]),
            untied_head=not given.tie_word_embeddings,
            data=str(text or "random"),  # which is printed
            **options,
        )
        hardware.remedied(config, hardware.require_host_memory, device)
        hardware.require_gpu_memory(config, device)
    if given.head_dim not in (config.head_dim, None):
        raise UsageError(f"{folder}: head_dim is {given.head_dim}, and only {config.head_dim} is supported")
    return hardware.remedied(config, run, device, given, folder, text, output)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    sys.exit(main())
