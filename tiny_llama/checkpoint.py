"""A trained model in a folder: --save writes it, --init-from starts from its weights, --resume goes on with the run.

    config.json, model.safetensors  the model, as Hugging Face's library transformers reads and writes it
    training.safetensors            what only training needs: the tensors of the optimizer and, as metadata, the fields
                                    of Config, the number of steps done, and an id that model.safetensors has as well

A folder that transformers has written, also with the weights in several files, does for --init-from. This needs the
library safetensors, and not transformers. No code of a folder is run.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import secrets
import shutil
import tempfile
from pathlib import Path

import torch

import tiny_llama_v3 as llama
from tiny_llama.files import open_input, replacing_files
from tiny_llama.hugging_face_weights import HF_SIZES, hf_names, to_hugging_face
from tiny_llama_v3 import UsageError

CONFIG, MODEL, TRAINING = "config.json", "model.safetensors", "training.safetensors"
INDEX = f"{MODEL}.index.json"  # in which file each weight is, where there are several
# What config.json has if it says nothing: as in LlamaConfig of transformers.
DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# What our model computes: fields that must be so, or missing.
SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "is_causal": True,
    "quantization_config": None,
    "rope_type": "default",
    "type": "default",  # its former name
    "partial_rotary_factor": 1.0,
}


@contextlib.contextmanager
def reported(flag, path, done="read", remedy="give another folder"):
    """Raise UsageError for what the system or the library says of a file."""
    library_error = import_safetensors(flag).SafetensorError
    try:
        yield
    except (OSError, ValueError, RecursionError, library_error) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{flag} {path} cannot be {done} ({reason}): {remedy}") from error


def import_safetensors(flag):
    """Return the library safetensors; UsageError if it is missing."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise UsageError(f"{flag} needs the library safetensors, which is missing: pip install safetensors") from error


def read_json(path, flag):
    """Return the object of a JSON file, a dict."""
    with reported(flag, path), open_input(path) as file:
        return as_object(file.read())


def as_object(text):
    """Convert the text of a JSON object to a dict; ValueError if it is none."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    return content


def open_tensors(path, flag):
    """Open a file of safetensors."""
    with reported(flag, path):
        open_input(path, math.inf).close()  # which refuses what would be waited for
        return import_safetensors(flag).safe_open(path, "pt")


def some(names):
    """Return the first of these names in the order of the alphabet, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


# ----------------------------------------------------------------------------------------------------------------------
# Reading a model


def model_fields(folder, flag):
    """Return {field of Config: value} of the model in a folder; UsageError names what ours cannot compute."""
    path = Path(folder, CONFIG)
    given = without_nulls(read_json(path, flag))
    parts = [given]
    for name in ("rope_scaling", "rope_parameters"):  # the former of transformers 4, the latter of 5
        rope = given.pop(name, {})
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            what = f"{name} is {rope!r:.80}, and only rope_type 'default' is supported"
            raise UsageError(f"{flag} {path}: {what}: give another model")
        parts.append(without_nulls(rope))
    given = DEFAULTS | given
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given["rope_theta"] = parts[-1].get("rope_theta", given["rope_theta"])
    expected = {"model_type": "llama"} | SUPPORTED
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    if all(isinstance(size, int) and size > 0 for size in (hidden, heads)):  # else Config refuses them
        expected["head_dim"] = hidden // heads
    for part in ({"model_type": None} | given, *parts[1:]):
        for name in expected.keys() & part.keys():
            if part[name] != expected[name]:
                what = f"{name} is {part[name]!r}, and only {expected[name]!r} is supported"
                raise UsageError(f"{flag} {path}: {what}: give another model")
    fields = {ours: given[theirs] for ours, theirs in HF_SIZES.items()} | {"rope_theta": given["rope_theta"]}
    if given["tie_word_embeddings"] not in (True, False):
        raise UsageError(f"{flag} {path}: tie_word_embeddings is {given['tie_word_embeddings']!r}: give true or false")
    fields["untied_head"] = not given["tie_word_embeddings"]
    try:
        llama.Config(**fields)
    except UsageError as error:
        text = str(error)
        for ours, theirs in (HF_SIZES | {"rope_theta": "rope_theta"}).items():
            text = text.replace(llama.flag_of(ours), theirs)
        raise UsageError(f"{flag} {path}: {text}") from error
    return fields


def without_nulls(given):
    """Return what a dict says: null is as good as nothing."""
    return {name: value for name, value in given.items() if value is not None}


def weight_files(folder, flag):
    """Return the paths of the files that hold the weights of a folder, in Hugging Face's format."""
    folder = Path(folder)
    if (folder / MODEL).exists() or not (folder / INDEX).exists():
        return [folder / MODEL]
    names = read_json(folder / INDEX, flag).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{flag} {folder / INDEX} has no weight_map of names: give another folder")
    for name in names.values():
        if Path(name).name != name:
            raise UsageError(f"{flag} {folder / INDEX} names {name!r}, which is no file of its folder: mend it")
    return [folder / name for name in sorted(set(names.values()))]


def hf_shapes(fields):
    """Return {name in a LlamaForCausalLM: shape} of the model that these fields of Config describe."""
    config = llama.Config(**fields)
    with torch.device("meta"):  # shapes without memory
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    return {name: [*weight.shape] for name, weight in to_hugging_face(model.named_parameters(), config)}


def read_weights(folder, names, flag):
    """Return {our name: fp32 tensor on the CPU} of the weights in a folder, in the order of these names.

    They are read one by one, so that the memory holds the model once. UsageError for weights that are missing, that the
    model does not have, of another shape, of no float type or not finite.
    """
    fields = model_fields(folder, flag)
    files = {}
    for path in weight_files(folder, flag):
        file = open_tensors(path, flag)
        files |= dict.fromkeys(file.keys(), file)
    shapes = hf_shapes(fields)
    # Old releases of transformers wrote the frequencies of rotary embedding as well.
    superfluous = {name for name in files.keys() - shapes.keys() if not name.endswith("rotary_emb.inv_freq")}
    tied = {"lm_head.weight"} & superfluous if not fields["untied_head"] else set()
    for problem, found in (("lacks", shapes.keys() - files.keys()), ("has, beside the model's,", superfluous - tied)):
        if found:
            raise UsageError(f"{flag} {folder} {problem} {some(found)}: give a folder with a whole LLaMA, and only it")

    def read(name, shape):
        """Return a weight of the folder in fp32, if it is as expected."""
        with reported(flag, folder):
            weight = files[name].get_tensor(name)
        if [*weight.shape] != shape:
            found = f"has the shape {[*weight.shape]}, and {CONFIG} says {shape}"
        elif not weight.is_floating_point():
            found = f"is of the type {weight.dtype}, which is no float type"
        elif not (weight := weight.float()).isfinite().all():
            found = "holds weights that are not finite"
        else:
            return weight
        raise UsageError(f"{flag} {folder}: {name} {found}: give another folder")

    # cat() copies: weights must not change or vanish with the file, which safetensors maps into the memory.
    weights = {name: torch.cat([read(part, shapes[part]) for part in hf_names(name)]) for name in names}
    if tied and not read("lm_head.weight", shapes["model.embed_tokens.weight"]).equal(weights["embed_tokens.weight"]):
        remedy = f"make it false in {CONFIG}"
        raise UsageError(f"{flag} {folder}: tie_word_embeddings is true beside another lm_head.weight: {remedy}")
    return weights


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def hf_config(config):
    """Return the content of config.json, as transformers 4 and 5 read it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in HF_SIZES.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not config.untied_head,
        "max_position_embeddings": config.seq_len,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # and by 5
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def write(folder, config, weights, number, tensors):
    """Write a model and what goes on with its training, whole or not at all. Other files of the folder stay.

    weights: an iterable of (our name, fp32 tensor on the CPU), number: steps done, tensors: {name: tensor on the CPU}
    of the optimizer. If the folder cannot be written by now, or another run has saved to the one of --save meanwhile,
    UsageError names another that has the model.
    """
    weights = {name: part.contiguous() for name, part in to_hugging_face(weights, config)}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    error = None
    for place in itertools.chain([Path(folder)], spare_folders()):
        try:
            if config.save is not None:
                require_own(place, "--save", config.resume)
            write_files(place, config, weights, number, tensors)
            break
        except UsageError as failure:
            error = error or failure
            with contextlib.suppress(OSError):
                place.rmdir()  # if it is empty
    else:
        raise error
    if error:
        raise UsageError(f"{error}; the trained model is in {place}") from error


def write_files(folder, config, weights, number, tensors):
    """Write the three files, given the weights with the names of transformers; training.safetensors comes last."""
    library = import_safetensors("--save")
    own = {"save": secrets.token_hex(8)}
    # Where the run began does not matter to who goes on with it, nor what was looked at meanwhile.
    fields = dataclasses.asdict(config) | {"init_from": None, "resume": None, "check": False, "profile": None}
    run = {"config": json.dumps(fields), "steps": str(number)} | own
    remedy = "free space or give another folder"
    with reported("--save", folder, "written", remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing_files(folder, [CONFIG, MODEL, TRAINING]) as new:
            (new / CONFIG).write_text(json.dumps(hf_config(config), indent=2) + "\n")
            library.torch.save_file(weights, new / MODEL, {"format": "pt"} | own)
            library.torch.save_file(tensors, new / TRAINING, run)
            for path in (new / MODEL, new / TRAINING):
                shutil.copymode(new / CONFIG, path)  # safetensors 0.8 hides them from the group


def spare_folders():
    """Yield new folders, where the user may write."""
    for place in (tempfile.gettempdir, Path.home, Path.cwd):
        with contextlib.suppress(OSError, RuntimeError):  # full, not there, or nobody's home
            yield Path(tempfile.mkdtemp(prefix="tiny_llama_", dir=place()))


def require_free(folder, flag, resumed=None):
    """Raise UsageError before training if write() could not write to a folder, or would replace another run's model.

    resumed is the folder that the run goes on with, or None: that one is replaced.
    """
    import_safetensors(flag)
    require_own(folder, flag, resumed)
    llama.writable_folder(flag, folder)


def require_own(folder, flag, resumed):
    """Raise UsageError if a folder holds a model, and is not the one that the run goes on with."""
    held = [path for pattern in (CONFIG, "*.safetensors") for path in Path(folder).glob(pattern)]
    if held and not (resumed and Path(folder).resolve() == Path(resumed).resolve()):
        raise UsageError(f"{flag} {folder} holds a model already: give another folder, or --resume {folder}")


# ----------------------------------------------------------------------------------------------------------------------
# Going on with a run


def open_training(folder, flag):
    """Return (fields of Config, number of steps, open file) of training.safetensors; UsageError if it does not fit."""
    path = Path(folder, TRAINING)
    import_safetensors(flag)
    if not path.exists():
        raise UsageError(f"{flag} {folder} has no {TRAINING}: --init-from {folder} starts from the weights alone")
    file, model = open_tensors(path, flag), open_tensors(Path(folder, MODEL), flag)
    with reported(flag, path):
        metadata = file.metadata() or {}
        fields, number = as_object(metadata.get("config", "")), int(metadata.get("steps", ""))
    unknown = fields.keys() - {field.name for field in dataclasses.fields(llama.Config)}
    if unknown:
        raise UsageError(f"{flag} {path} is of another version, with {some(unknown)}: use that version, or --init-from")
    in_config = model_fields(folder, flag)
    of_one_save = metadata.get("save") == (model.metadata() or {}).get("save")
    if not of_one_save or in_config != {name: fields.get(name) for name in in_config}:
        remedy = f"--init-from {folder} starts from the weights alone"
        raise UsageError(f"{flag} {folder}: {CONFIG}, {MODEL} and {TRAINING} are not of one --save: {remedy}")
    return fields, number, file


def training_fields(folder, flag):
    """Return {field of Config: value} of the run that was saved, which saves to this folder again."""
    fields, _, _ = open_training(folder, flag)
    return fields | {"save": str(folder)}  # wherever it has been moved


def read_training(folder, flag):
    """Return (the number of steps done, {name: tensor on the CPU} of the optimizer)."""
    _, number, file = open_training(folder, flag)
    with reported(flag, Path(folder, TRAINING)):
        return number, {name: file.get_tensor(name).clone() for name in file.keys()}
