"""Models small enough for Triton's interpreter, with grouped queries and sizes that are no powers of two."""

import dataclasses
from unittest import mock

import tiny_llama_v3 as llama

TINY = llama.Config(
    hidden_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=48,
    vocab_size=37,
    batch_size=2,
    seq_len=17,
    num_steps=3,
    warmup_steps=0,
)
# For tests of many steps.
SMALL = dataclasses.replace(
    TINY,
    hidden_dim=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=24,
    vocab_size=7,
    batch_size=1,
    seq_len=3,
    learning_rate=1e-2,
)


def run_of(config, device, kind=llama.TrainStep, world=None):
    """Return (step, records) of a whole run on a device, with a TrainStep of this kind."""
    step, records = kind(config, device, world), []
    llama.warm_up(step)
    llama.train(step, step.world.batches(config), records)
    return step, records


def without_groups():
    """Return a patch with which layers are computed one by one, as where tiny_llama/groups.py is missing."""
    companion = llama.companion
    return mock.patch.object(llama, "companion", lambda name, *why: None if name == "groups" else companion(name, *why))


def owner_of(model, *args, **options):
    """Return a FlatAdamW(*args, **options) that owns a model."""
    optimizer = llama.FlatAdamW(*args, **options)
    optimizer.own(model)
    return optimizer
