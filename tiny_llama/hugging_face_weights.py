"""Sizes, names and weights of a LLaMA in our model and in Hugging Face's. The library transformers is not imported."""

import torch

HF_SIZES = {  # {our field: theirs}
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
HF_NAMES = {  # {our module: the modules whose weights it stacks, because they multiply the same input}
    "embed_tokens": ["model.embed_tokens"],
    "attention_norm": ["input_layernorm"],
    "attention.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.o_proj": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    "feed_forward.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "feed_forward.down_proj": ["mlp.down_proj"],
    "norm": ["model.norm"],
    "lm_head": ["lm_head"],
}


def hf_names(name):
    """Return the names of the weights that our parameter of this name stacks; KeyError for a name that is not ours.

    layers.3.attention.qkv_proj.weight -> model.layers.3.self_attn.q_proj.weight and those of k_proj and v_proj
    """
    prefix, module = "", name.removesuffix(".weight")
    if module.startswith("layers."):
        _, index, module = module.split(".", 2)
        prefix = f"model.layers.{index}."
    return [f"{prefix}{counterpart}.weight" for counterpart in HF_NAMES[module]]


def from_hugging_face(theirs, names):
    """Return {name of our parameter: new tensor} of weights or gradients {name in a LlamaForCausalLM: tensor}.

    names: of our parameters, in the order of the result. Types and devices stay. KeyError names what is missing.
    """
    return {name: torch.cat([theirs[part] for part in hf_names(name)]) for name in names}


def to_hugging_face(weights, config):
    """Yield (name in a LlamaForCausalLM, tensor) for (name of our parameter, tensor), views of the same memory."""
    kv_dim = config.num_kv_heads * config.head_dim
    for name, weight in weights:
        parts = hf_names(name)
        rows = [config.hidden_dim, kv_dim, kv_dim] if len(parts) == 3 else len(weight) // len(parts)
        yield from zip(parts, weight.split(rows), strict=True)


@torch.no_grad()
def copy_to_hugging_face(weights, model):
    """Copy {name of our parameter: tensor} into a LlamaForCausalLM, whose types and devices stay.

    KeyError names a weight that the model lacks, RuntimeError the parameters of the model that have got none.
    """
    theirs = dict(model.named_parameters())
    for name, weight in weights.items():
        parts = [theirs.pop(hf_name) for hf_name in hf_names(name)]
        for part, value in zip(parts, weight.split([len(part) for part in parts]), strict=True):
            part.copy_(value)
    if theirs:
        raise RuntimeError(f"no counterpart of {', '.join(theirs)}")
