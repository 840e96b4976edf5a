"""Load a LLaMA in Hugging Face's format into our model, train it for some steps, and save it in the same format.

    python -m examples.hf_weights FOLDER
    python -m examples.hf_weights FOLDER --text FILE --num-steps 100 --output NEW_FOLDER

FOLDER contains config.json and *.safetensors, as save_pretrained() and `hf download NAME --local-dir FOLDER` write
them. The library transformers reads and writes it, without a network, and no code that lies in the folder is run. The
logits are compared with those of its model, in fp32, before training and again for what was saved. --text is read by
the folder's tokenizer; without it, the tokens are random.

Exit codes: 0 done, 1 the logits differ, or the loss is not finite, 2 the request cannot be met, 130 interrupted.
"""

import contextlib
import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path

import torch

if not __package__:
    print("run it from the root as python -m examples.hf_weights", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.steps import HF_SIZES, copy_to_hugging_face, hf_names
from measure.command_line import Failure, Parser, positive, program
from measure.results import describe
from measure.timing import release
from tiny_llama import hardware

try:
    import transformers
except ModuleNotFoundError:
    transformers = None

# Of the logits, relative to the largest. transformers has the angles of rotary embedding in fp32, ours are from fp64:
# at position 2,048 this alone makes 6e-5.
TOLERANCE = 1e-4
# What our model computes: fields of config.json that must be so, or missing.
SUPPORTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
# A folder's Python is not run whatever its files ask for, and what it lacks is not looked for elsewhere.
LOCAL = dict(trust_remote_code=False, local_files_only=True)


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's folder


@contextlib.contextmanager
def reported(what):
    """Turn what transformers, safetensors or the system raise when they read something into Failure."""
    try:
        yield
    except Exception as error:
        raise Failure(f"{what} cannot be read ({describe(error)})") from error


def refuse_other_models(folder, config):
    """Raise Failure if our model cannot compute what a configuration describes."""
    given = config.to_dict()
    head_dim = given.get("hidden_size", 0) // given.get("num_attention_heads", 1)
    for name, value in (SUPPORTED | {"head_dim": head_dim}).items():
        if given.get(name, value) not in (value, None):
            raise Failure(f"{folder}: {name} is {given[name]!r} in config.json, and only {value!r} is supported")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}  # the latter before transformers 5
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise Failure(f"{folder}: rope scaling is not supported, and config.json has {rope}")


def load(folder):
    """Return the LlamaForCausalLM of a folder, in fp32."""
    if not folder.is_dir():
        raise Failure(f"{folder} is no folder: give one with a whole LLaMA, as hf download --local-dir makes it")
    if (folder / "adapter_config.json").exists():
        raise Failure(f"{folder} holds an adapter, whose model is elsewhere: merge it into its model first")
    with reported(folder):
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    refuse_other_models(folder, config)
    with reported(folder):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            attn_implementation="sdpa",  # a name of config.json may be that of code in Hugging Face's hub
            use_safetensors=True,
            output_loading_info=True,
            **LOCAL,
        )
    wrong = {kind: found[kind] for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    if wrong:
        raise Failure(f"{folder} does not hold the weights of a LLaMA, but {wrong}: give another folder")
    return model.float().eval()


def text_batches(path, folder, config):
    """Return what llama.random_tokens() does, of random windows of a text."""
    with reported(f"--text {path} or the tokenizer of {folder}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
        # Not verbose: it would warn of a text that is longer than the model's context, of which windows are taken.
        tokens = torch.tensor(tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids)
    if len(tokens) <= config.seq_len or tokens.max() >= config.vocab_size:
        needed = f"more than --seq-len {config.seq_len} of a vocabulary of {config.vocab_size} are needed"
        raise Failure(f"--text {path} has {len(tokens)} tokens, and {needed}")
    # The same windows in every run.
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        first = torch.randint(len(tokens) - config.seq_len, (config.batch_size, 1), generator=generator)
        sequence = tokens[first + torch.arange(config.seq_len + 1)]
        yield sequence[:, :-1], sequence[:, 1:]


def save(step, model, folder, output):
    """Write the trained weights, and the folder's tokenizer if it has one, to a new folder, whole or not at all."""
    weights = step.optimizer.weights() if step.implementation == "triton" else step.optimizer.parameters
    copy_to_hugging_face(dict(zip(dict(step.model.named_parameters()), weights, strict=True)), model)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output first, and renamed at last: what fails leaves no half of a model.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".", suffix=".tmp") as scratch:
        new = Path(scratch, output.name)
        model.save_pretrained(new)
        try:
            transformers.AutoTokenizer.from_pretrained(folder, **LOCAL).save_pretrained(new)
        except Exception:  # of transformers, tokenizers or the system
            print(f"{folder} has no tokenizer that can be read: none was saved")
        new.rename(output)


# ----------------------------------------------------------------------------------------------------------------------
# Our model


def config_of(model, **options):
    """Return the Config of a LlamaForCausalLM, with these options."""
    given = model.config
    if options["seq_len"] > given.max_position_embeddings:
        limit = f"the model's {given.max_position_embeddings} positions"
        raise Failure(f"--seq-len {options['seq_len']} is more than {limit}: give fewer")
    rope = getattr(given, "rope_parameters", None) or vars(given)
    sizes = {ours: getattr(given, theirs) for ours, theirs in HF_SIZES.items()}
    untied = not given.tie_word_embeddings
    return llama.Config(**sizes, rope_theta=float(rope["rope_theta"]), untied_head=untied, **options)


def make_step(config, device, model):
    """Return a TrainStep that starts from the weights of a LlamaForCausalLM."""
    step, theirs = llama.TrainStep(config, device), dict(model.named_parameters())
    names = [name for name, _ in step.model.named_parameters()]
    # Ours stack what multiplies the same input: queries, keys and values, and the two halves of SwiGLU.
    step.initial_weights = [torch.cat([theirs[part].detach() for part in hf_names(name)]) for name in names]
    step.restart()
    return step


@torch.no_grad()
def same_logits(config, device, model, folder):
    """Return whether our model has the logits of transformers'; print by how much they differ."""
    step = make_step(dataclasses.replace(config, use_amp=False), device, model)
    step.load(*next(llama.random_tokens(config)))
    expected = model.to(device.type)(step.tokens).logits
    model.cpu()
    difference = ((step.model(step.tokens) - expected).abs().max() / expected.abs().max()).item()
    print(f"Logits of {folder}: they differ from those of transformers by {difference:.1e} (allowed: {TOLERANCE})")
    return difference <= TOLERANCE


def run(config, device, model, folder, text, output):
    """Compare, train, save and compare again. Return the exit code."""
    batches = text_batches(text, folder, config) if text else llama.random_tokens(config)
    first = next(batches)  # errors come before anything is computed
    if not same_logits(config, device, model, folder):
        return 1
    release(device)
    step, records = make_step(config, device, model), []
    llama.print_configuration(step)
    llama.train(step, itertools.chain([first], batches), records)
    if llama.divergence(records):
        return 1
    if output:
        save(step, model, folder, output)
        return 0 if same_logits(config, device, load(output), output) else 1
    return 0


@program("hf_weights")
def main(argv):
    parser = Parser("hf_weights", __doc__)
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text (default: random tokens)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="save the trained model in a new folder")
    parser.add_argument("--num-steps", type=positive, default=10, help="training steps (default: 10)")
    parser.add_argument("--batch-size", type=positive, default=1, help="sequences a step (default: 1)")
    parser.add_argument("--seq-len", type=positive, default=128, help="tokens a sequence (default: 128)")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="AdamW's (default: 1e-5)")
    parser.add_argument("--use-amp", action="store_true", help="train in bf16, with fp32 weights in the optimizer")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    options = vars(parser.parse_args(argv))
    folder, text, output = (options.pop(name) for name in ("folder", "text", "output"))
    if output and output.exists():
        raise Failure(f"--output {output} exists: give the name of a new folder")
    if transformers is None:
        raise Failure("hf_weights needs a library: pip install transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it would warn of is refused
    model = load(folder)
    config = config_of(model, **options)
    device = llama.TrainStep.select_device(config)
    config = dataclasses.replace(config, data=str(text or "random"))  # which is printed
    return hardware.remedied(config, run, device, model, folder, text, output)


if __name__ == "__main__":
    sys.exit(main())
