"""Models small enough for Triton's interpreter, with grouped queries and sizes that are no powers of two."""

import dataclasses

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


def run_of(config, device, kind=llama.TrainStep):
    """Return (step, records) of a whole run on a device, which may be a name, with a TrainStep of this kind."""
    step, records = kind(config, llama.get_device(device) if isinstance(device, str) else device), []
    llama.warm_up(step)
    llama.train(step, step.batches(config.seed), records)
    return step, records
