"""Measure what the pictures of a replay need beside the stages.

    python -m exercises.performance_debugging.measured ceilings --use-amp --output-dir DIR    writes DIR/ceilings.json

ceilings: the bandwidth and the arithmetic that this device reaches. attention_layouts: the attention kernel over the
length of the sequence, with K and V in both layouts of stage 2. kernel_timeline: when each kernel of a step of stages 5
and 8 runs. The last two need a GPU. The options are those of tiny_llama_v3.py.
"""

import dataclasses
import functools
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.measured", file=sys.stderr)
    sys.exit(2)
import torch
from torch.utils.benchmark import Timer

import tiny_llama_v3 as llama
from measure.command_line import program
from measure.results import write_json
from measure.timing import Bench, in_turns, replay_ms
from tiny_llama import hardware

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
REPLAYS = 21  # of each layout, in turns
GRAPH_MS = 1.0  # a graph holds as many calls as take about this time, at most eight
STEPS = 5  # of a timeline, of which the one with the median length is used


def ceilings(config, device):
    """Return what a copying kernel and the library's matmul reach in this precision, and the datasheet's peak."""
    on_gpu = device.type == "cuda"
    # More bytes than any cache holds, and a product that is large enough for all multiprocessors.
    x = torch.ones(2**28 if on_gpu else 2**24, device=device.type)
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, device=device.type).to(torch.bfloat16 if config.use_amp else torch.float32)

    def seconds(statement, **names):
        timer = Timer(statement, globals={"torch": torch} | names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    bandwidth = 2 * x.nbytes / seconds("torch.neg(x, out=y)", x=x, y=torch.empty_like(x))
    arithmetic = 2 * side**3 / seconds("torch.mm(a, b, out=c)", a=a, b=a.clone(), c=torch.empty_like(a))
    print(f"{device.name}: {bandwidth / 1e12:.3g} TB/s, {arithmetic / 1e12:.3g} TFLOP/s")
    peak = hardware.peak_tflops(device, llama.precision_name(config, device))
    return {"bytes_per_second": bandwidth, "flop_per_second": arithmetic, "peak_tflops": peak}


def layouts(config, bench, seq_len):
    """Return {layout: (q, k, v)}, each (batch, seq, heads, head_dim), with the same values."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    dtype = torch.bfloat16 if config.use_amp else torch.float32
    qkv = bench.randn(config.batch_size, seq_len, width, dtype=dtype)
    q, k, v = llama.split_heads(qkv, config.num_heads, config.num_kv_heads)
    return {"contiguous": (q, k, v), "strided": (q, llama.badly_strided(k), llama.badly_strided(v))}


def attention_layouts(config, device):
    """Return {"precision", "batch_size", "lengths"}, lists of {"seq_len", and of each layout the us of its calls}."""
    bench, rows = Bench(device), []
    for seq_len in LENGTHS:
        inputs = layouts(config, bench, seq_len)
        calls = [functools.partial(llama.flash_attention_forward, *tensors) for tensors in inputs.values()]
        # In a graph, as a launch takes longer than a short kernel.
        single = replay_ms(bench.capture(calls[:1], 1))
        in_graph = max(1, min(8, round(GRAPH_MS / single)))
        graphs = [bench.capture([call], in_graph) for call in calls]
        # The first replay of a graph uploads it.
        for graph in graphs:
            replay_ms(graph)
        ms = in_turns([functools.partial(replay_ms, graph) for graph in graphs], REPLAYS)
        us = ([one * 1e3 / in_graph for one in of_layout] for of_layout in ms)
        rows.append({"seq_len": seq_len} | dict(zip(inputs, us, strict=True)))
    return {"precision": llama.precision_name(config, device), "batch_size": config.batch_size, "lengths": rows}


def timeline(config, device):
    """Return {"step_us": from the first kernel to the end of the last, "start_us" and "length_us" of all kernels}.

    Only the device is recorded: the script's --profile records the host as well, which doubles the gaps.
    """
    step = llama.TrainStep(config, device)
    llama.warm_up(step)
    step.load(*next(step.batches(config.seed)))
    recorded = []
    for _ in range(STEPS):
        step.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            step.run()
            step.synchronize()
        # PyTorch lists what the host did as well, even where only the device was recorded.
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels = sorted((event.time_range.start, event.time_range.end) for event in events)
        begin = kernels[0][0]
        starts = [round(start - begin, 3) for start, _ in kernels]
        lengths = [round(end - start, 3) for start, end in kernels]
        recorded.append({"step_us": max(end for _, end in kernels) - begin, "start_us": starts, "length_us": lengths})
    return sorted(recorded, key=lambda one: one["step_us"])[STEPS // 2]


def kernel_timeline(config, device):
    """Return {stage: its timeline} of stages 5 and 8."""
    timelines = {}
    for stage in (5, 8):
        staged = dataclasses.replace(config, **llama.stage_flags(stage))
        llama.validate_on_device(staged, device)
        timelines[stage] = timeline(staged, device)
    return timelines


MEASUREMENTS = {function.__name__: function for function in (ceilings, attention_layouts, kernel_timeline)}


@program("measured.py")
def main(argv):
    name, *options = argv or ["nothing"]
    if name not in MEASUREMENTS:
        raise llama.UsageError(f"{name} is no measurement: give one of {', '.join(MEASUREMENTS)}")
    config = llama.parse_config(options, "measured.py")
    device = llama.select_device(config.device)
    if name != "ceilings" and device.type == "cpu":
        raise llama.UsageError(f"{name} needs a GPU, and there is none, or --device is cpu")
    torch.set_float32_matmul_precision(config.matmul_precision)
    write_json(Path(config.output_dir, f"{name}.json"), MEASUREMENTS[name](config, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
