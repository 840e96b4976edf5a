"""Measure the attention kernel over the length of the sequence, with K and V in both layouts of stage 2.

    python -m exercises.performance_debugging.attention_layouts --use-amp --output-dir DIR

writes DIR/attention_layouts.json. The options are those of tiny_llama_v3.py, of whose sizes batch and heads are used.
A GPU is needed, as Triton's interpreter does not model memory.
"""

import functools
import statistics
import sys

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.attention_layouts", file=sys.stderr)
    sys.exit(2)
import torch

import tiny_llama_v3 as llama
from exercises.performance_debugging.measured import program_of
from measure.tables import number, times
from measure.timing import Bench, in_turns, replay_ms

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
REPLAYS = 21  # of each layout, in turns
GRAPH_MS = 1.0  # a graph holds as many calls as take about this time, at most eight


def layouts(config, bench, seq_len):
    """{layout: (q, k, v)}, each (batch, seq, heads, head_dim), with the same values."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    dtype = torch.bfloat16 if config.use_amp else torch.float32
    qkv = bench.randn(config.batch_size, seq_len, width, dtype=dtype)
    q, k, v = llama.split_heads(qkv, config.num_heads, config.num_kv_heads)
    return {"contiguous": (q, k, v), "strided": (q, llama.badly_strided(k), llama.badly_strided(v))}


def measure_length(config, bench, seq_len):
    """Returns {"seq_len", and for each layout the us of one call in every replay}."""
    inputs = layouts(config, bench, seq_len)
    calls = {layout: functools.partial(llama.flash_attention_forward, *tensors) for layout, tensors in inputs.items()}
    single = replay_ms(bench.capture([calls["contiguous"]], 1))
    in_graph = max(1, min(8, round(GRAPH_MS / single)))
    graphs = [bench.capture([call], in_graph) for call in calls.values()]
    for graph in graphs:
        replay_ms(graph)
    ms = in_turns([functools.partial(replay_ms, graph) for graph in graphs], REPLAYS)
    us = ([one * 1e3 / in_graph for one in of_layout] for of_layout in ms)
    return {"seq_len": seq_len} | dict(zip(calls, us, strict=True))


def measure(config, device):
    """Returns {"precision", "batch_size", "lengths": [see measure_length]}, and prints each length."""
    bench, rows = Bench(device), []
    for seq_len in LENGTHS:
        rows.append(measure_length(config, bench, seq_len))
        contiguous, strided = (statistics.median(rows[-1][layout]) for layout in ("contiguous", "strided"))
        slow = f"{number(strided)} us badly strided, {times(strided / contiguous)}"
        print(f"{seq_len} tokens: {number(contiguous)} us contiguous, {slow}")
    return {"precision": llama.precision_name(config, device), "batch_size": config.batch_size, "lengths": rows}


main = program_of("attention_layouts", measure)

if __name__ == "__main__":
    sys.exit(main())
