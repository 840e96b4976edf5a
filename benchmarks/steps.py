"""Time whole training steps (forward, backward, optimizer) of several implementations side by side, in one process.

    python -m benchmarks.steps                                every size and row, bf16
    python -m benchmarks.steps --sizes small --rows "triton graph" "sdpa compile graph"
    python -m benchmarks.steps --rows peers           a named group: ours, eager, peers, fp8, autotuned, sweep, shapes
    python -m benchmarks.steps --sweep length         how the cost grows; also width, vocab, micro-batches
    python -m benchmarks.steps --sweep shapes         the shapes of ten models
    TRITON_INTERPRET=1 python -m benchmarks.steps --tiny      a small model, also on a CPU

A row is an implementation, eager or compiled, launched kernel by kernel or as one captured graph: its name, and then
"compile", "graph" or both. Loss and gradients are checked first: an implementation that fails is not timed. Then each
row is timed in windows that alternate with those of our own kernels, so that both see the same state of the machine.
The table at the end has ours beside the strongest peer of each model.
README.md in this folder explains the result.

Exit codes: 0 done, 1 an implementation's gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

if not __package__:
    print("run it from the root as python -m benchmarks.steps", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Contender, Run, make_parser, measure_rows, release_all, summarize
from measure.command_line import positive, program
from measure.results import Unavailable, import_library, versions
from measure.tables import cell, number, text_table
from measure.work import SIZES, SWEEPS
from tiny_llama import fp8, hardware
from tiny_llama.hugging_face_weights import HF_SIZES, copy_to_hugging_face, from_hugging_face

WARMUP_STEPS = 4
OURS = "triton"
AUTOTUNED = "sdpa max-autotune"
PEERS = "transformers", "liger_kernel", "flash_attn", "torchao"

# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's LLaMA with our sizes and initial weights


class HuggingFaceLlama(nn.Module):
    """LlamaForCausalLM with the interface of our model: tokens and targets -> mean loss."""

    pristine = None  # the contents of modeling_llama, which Liger patches

    def __init__(self, config, liger=False, ours=False):
        super().__init__()
        modeling_llama = import_library("transformers.models.llama.modeling_llama")
        if HuggingFaceLlama.pristine is None:
            HuggingFaceLlama.pristine = dict(vars(modeling_llama))
        vars(modeling_llama).update(HuggingFaceLlama.pristine)
        # Nothing is padded or packed. Without a mask SDPA uses its causal kernel; compiled or captured, the library
        # could not look at the positions and would build a mask.
        modeling_llama.create_causal_mask = lambda *args, **kwargs: None
        self.llama = modeling_llama.LlamaForCausalLM(
            modeling_llama.LlamaConfig(
                **{theirs: getattr(config, ours) for ours, theirs in HF_SIZES.items()},
                max_position_embeddings=config.seq_len,
                rope_theta=config.rope_theta,
                tie_word_embeddings=not config.untied_head,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
        self.cross_entropy = F.cross_entropy
        if liger:
            # Without its cross-entropy, which waits for the host and cannot be captured.
            import_library("liger_kernel.transformers").apply_liger_kernel_to_llama(
                fused_linear_cross_entropy=False, cross_entropy=False, model=self.llama
            )
        if ours:
            from tiny_llama import hugging_face

            hugging_face.swap_kernels(self.llama)
            self.cross_entropy = hugging_face.cross_entropy
        self.llama.train()

    def forward(self, tokens, targets):
        logits = self.llama(input_ids=tokens, use_cache=False).logits
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------------------------------------
# Implementations: functions of a llama.Config and a torch.device that return a llama.TrainStep


def hugging_face(config, device, **variant):
    """Return the training step of --impl torch with Hugging Face's model."""
    step = llama.TrainStep(config, device)
    with torch.device(device.type):
        model = HuggingFaceLlama(config, **variant)
    copy_to_hugging_face(dict(step.model.named_parameters()), model.llama)
    step.model = step.run_model = model
    # What restart() returns to, and what the optimizer updates, are those of the other model from now on.
    step.initial_weights = [p.detach().cpu().clone() for p in model.parameters()]
    step.optimizer = llama.TorchAdamW(model, config.learning_rate)
    if config.compile:
        step.run_model = torch.compile(model)
    return step


def with_our_optimizer(config, device):
    """Return PyTorch's model with our optimizer, which differs from ours only in the kernels."""
    step = llama.TrainStep(config, device)
    step.optimizer = llama.FlatAdamW(config.learning_rate, config.use_amp)
    step.optimizer.own(step.model)
    return step


def in_bf16(config, device):
    """Return PyTorch's model and optimizer with weights and moments in bf16, the least work that PyTorch can do.

    Updates below half a bit of a bf16 weight are lost, so that it trains worse. Its gradients are checked like others.
    """
    if not config.use_amp:
        raise Unavailable("weights in bf16 are for a run in bf16")
    step = llama.TrainStep(config, device)
    for p in step.model.parameters():  # the rotary embedding's tables stay in fp32
        p.data = p.data.bfloat16()
    step.optimizer = llama.TorchAdamW(step.model, config.learning_rate)
    return step


def autotuned(config, device):
    """Return PyTorch's model, for whose compiled kernels the fastest of many configurations is searched, in minutes."""
    step = llama.TrainStep(dataclasses.replace(config, compile=False), device)
    if config.compile:
        step.run_model = torch.compile(step.model, mode="max-autotune-no-cudagraphs")
    return step


def with_flash_attention_4(config, device):
    """Return PyTorch's model with FlashAttention 4, for NVIDIA's GPUs from Hopper on."""
    # torch.compile cannot look into its compiler. Captured, the parts of the graph cost no launches.
    flash_attention = torch.compiler.disable(import_library("flash_attn.cute").flash_attn_func)

    def attend(module, x, cos, sin):
        q, k, v = llama.split_heads(F.linear(x, module.qkv_proj.weight), module.num_heads, module.num_kv_heads)
        q, k = (llama.torch_rope(t, cos, sin) for t in (q, k))
        return F.linear(flash_attention(q, k, v, causal=True)[0].flatten(2), module.o_proj.weight)

    step = llama.TrainStep(config, device)
    for layer in step.model.layers:
        layer.attention.forward = functools.partial(attend, layer.attention)
    return step


def torchao(config, device, recipe):
    """Return PyTorch's model with torchao's products in FP8 by one of its recipes, of the same weights as ours."""

    # It converts modules, and our operations take weights.
    def linear(x, projection):
        return projection(x)

    def attend(module, x, cos, sin):
        heads = module.num_heads, module.num_kv_heads
        return llama.sdpa_attention(x, module.qkv_proj, module.o_proj, cos, sin, *heads, linear=linear)

    def feed_forward(module, x):
        return llama.torch_swiglu(x, module.gate_up_proj, module.down_proj, linear=linear)

    step = llama.TrainStep(config, device)
    float8 = import_library("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(step.model.layers, config=recipe)
    for layer in step.model.layers:
        layer.attention.forward = functools.partial(attend, layer.attention)
        layer.feed_forward.forward = functools.partial(feed_forward, layer.feed_forward)
    return step


TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
IMPLEMENTATIONS = {
    OURS: llama.TrainStep,
    "torch": llama.TrainStep,
    "sdpa": llama.TrainStep,
    "hf": hugging_face,
    "hf liger": functools.partial(hugging_face, liger=True),
    f"hf {OURS}": functools.partial(hugging_face, ours=True),
    "sdpa fa4": with_flash_attention_4,
    AUTOTUNED: autotuned,
    "sdpa flat": with_our_optimizer,
    "sdpa bf16": in_bf16,
    f"{OURS} fp8": llama.TrainStep,
    **{f"sdpa {recipe}": functools.partial(torchao, recipe=recipe) for recipe in TORCHAO_RECIPES},
}
# These separate the effects of kernels, optimizer and precision. They are no peers: one has our kernels, one our
# optimizer, one bf16 weights.
YARDSTICKS = (f"hf {OURS}", "sdpa flat", "sdpa bf16")


class Row(NamedTuple):
    """An implementation, and how it is run."""

    implementation: str
    compile: bool = False
    graph: bool = False

    @property
    def name(self):
        return self.implementation + " compile" * self.compile + " graph" * self.graph

    @classmethod
    def named(cls, name):
        """Return the Row of a name such as "sdpa fa4 compile graph"."""
        implementation, graph = name.removesuffix(" graph"), name.endswith(" graph")
        return cls(implementation.removesuffix(" compile"), implementation.endswith(" compile"), graph)


ANCHOR = "sdpa compile graph"  # in each group, so that results of different days can be compared
GROUPS = {
    "ours": [OURS, f"{OURS} graph", "torch graph", ANCHOR, "sdpa flat compile graph"],
    "eager": [OURS, "torch", "sdpa", "sdpa compile"],  # in a small model they wait for the host
    "peers": [
        f"{OURS} graph",
        ANCHOR,
        "hf compile graph",
        "hf liger compile graph",
        "sdpa fa4 compile graph",
        "sdpa bf16 compile graph",
    ],
    "fp8": [
        f"{OURS} graph",
        ANCHOR,
        f"{OURS} fp8 graph",
        "sdpa tensorwise compile graph",
        "sdpa rowwise_with_gw_hp compile graph",
    ],
    "autotuned": [f"{OURS} graph", ANCHOR, f"{AUTOTUNED} compile graph"],
    "sweep": ["torch graph", ANCHOR, f"{OURS} graph"],
    "shapes": [ANCHOR, f"{OURS} graph"],
    "micro-batches": [ANCHOR, f"{OURS} graph"],
}
ROWS = {name: Row.named(name) for names in GROUPS.values() for name in names}


def is_fp8(name):
    """Return whether a row, or an implementation, multiplies in FP8."""
    return not {"fp8", *TORCHAO_RECIPES}.isdisjoint(name.split())


def make_step(row, config, device):
    """Return the training step of a Row, with a batch; Unavailable if it cannot run."""
    words = row.implementation.split()
    obstacle = llama.triton_obstacle(device, config.use_amp) if {OURS, "flat"} & {*words} else None
    if (row.graph or row.compile) and device.type == "cpu":
        obstacle = "needs a GPU"
    arch = llama.get_gpu(device.type).arch
    if is_fp8(row.implementation) and not (config.use_amp and fp8.formats_of(arch)):
        obstacle = f"FP8 is for bf16, and for a GPU that has it ({arch})"
    if obstacle:
        raise Unavailable(obstacle)
    impl = "torch" if words[0] == "hf" else words[0]
    config = dataclasses.replace(config, impl=impl, fp8="fp8" in words, compile=row.compile, graph=row.graph)
    step = IMPLEMENTATIONS[row.implementation](config, device)
    step.load(*next(llama.batches(config)))
    return step


# ----------------------------------------------------------------------------------------------------------------------
# The gate checks loss and gradients of each implementation by the rule of tiny_llama_v3.py --check.


def loss_and_gradients(implementation, config, device, batch):
    """Return llama.loss_and_gradients() of any implementation, under the names of our parameters."""
    results = llama.loss_and_gradients(make_step(Row(implementation), config, device), batch)
    if not implementation.startswith("hf"):
        return results
    with torch.device("meta"):
        ours = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"]).named_parameters()
    theirs = {name.removeprefix("llama."): gradient for name, gradient in results.items()}
    return {"loss": results["loss"]} | from_hugging_face(theirs, [name for name, _ in ours])


def check(run, implementations, config):
    """Return {implementation: the entry of the gate in the result}."""
    device, timed = run.device, config
    config = dataclasses.replace(config, batch_size=min(config.batch_size, llama.CHECK_BATCH))
    batch = next(llama.batches(config))
    # Computed once: in fp32, or for a run in fp32 in fp64, it takes longer than all implementations together.
    exact = llama.exact_loss_and_gradients(config, device, batch)
    tolerance = llama.CHECK_ATOL[llama.precision_name(config, device)]

    @functools.cache
    def plain_errors(in_fp8):
        plain = dataclasses.replace(config, impl="torch", fp8=in_fp8)
        return llama.relative_errors(llama.loss_and_gradients(llama.TrainStep(plain, device), batch), exact)

    def require_small(errors, allowed, what):
        verdict = llama.judge(errors, allowed, tolerance)
        if verdict.failed:
            wrong = f"{len(verdict.failed)} of {len(errors)} differ, {verdict.worst} the most"
            raise ArithmeticError(f"{what}: {wrong}")
        worst = verdict.worst  # a file has null for an error that is infinite
        return {"worst": worst, "relative_error": errors[worst], "allowed": verdict.allowed[worst]}

    def require_compiled_as_eager(allowed):
        # Its tiles depend on the shapes and are chosen by their time alone: some compilers have got one wrong.
        full_batch, results = next(llama.batches(timed)), []
        for row in (Row(AUTOTUNED), Row(AUTOTUNED, compile=True)):
            results.append(llama.loss_and_gradients(make_step(row, timed, device), full_batch))
            release_all(device)
        eager, compiled = results
        require_small(llama.relative_errors(compiled, eager), allowed, "wrong gradients once it is compiled")

    def judge(implementation):
        allowed = plain_errors(is_fp8(implementation))
        errors = llama.relative_errors(loss_and_gradients(implementation, config, device, batch), exact)
        fields = require_small(errors, allowed, "wrong gradients")
        if implementation == AUTOTUNED:
            require_compiled_as_eager(allowed)
        return fields

    gates = {}
    for implementation in implementations:
        release_all(device)
        gate = run.attempt(functools.partial(judge, implementation))
        gates[implementation] = {"passed": gate["error"] is None, **gate}
        print(f"    gate {implementation:9} {gate['error'] or 'passed'}", flush=True)
    return gates


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def compare_rows(ours, peer, rows):
    """Return our time and memory divided by the peer's; if they were timed in turns, of each window, with spread."""
    ratio = rows[peer]["ratio"] if rows[peer].get("reference") == ours else None
    memory = [rows[name]["peak_memory_mib"] for name in (ours, peer)]
    return {
        "ours": ours,
        "peer": peer,
        "time_ratio": ratio["median"] if ratio else rows[ours]["ms"]["median"] / rows[peer]["ms"]["median"],
        "spread": [ratio["p20"], ratio["p80"]] if ratio else None,
        "memory_ratio": memory[0] / memory[1] if all(memory) else None,
    }


def conclude(result):
    """Find the strongest peer, in bf16 and in FP8, and compare ours with it and with plain eager PyTorch."""
    rows = {name: row for name, row in result["rows"].items() if row["error"] is None}

    def strongest_peer(in_fp8):
        own = OURS, f"{OURS} fp8", *YARDSTICKS
        peers = [name for name in rows if is_fp8(name) == in_fp8 and Row.named(name).implementation not in own]
        return min(peers, key=lambda name: rows[name]["ms"]["median"], default=None)

    result["strongest_peer"] = strongest_peer(False)
    ours = next((name for name in (f"{OURS} graph", OURS) if name in rows), None)
    in_fp8 = f"{OURS} fp8 graph"
    # Ours beside the strongest peer, eager beside eager, and FP8 beside FP8 and beside ours in bf16.
    pairs = [(ours, result["strongest_peer"]), (OURS, "torch"), (OURS, "sdpa compile")]
    pairs += [(in_fp8, strongest_peer(True)), (in_fp8, ours)]
    result["comparisons"] = [compare_rows(*pair, rows) for pair in dict.fromkeys(pairs) if rows.keys() >= {*pair}]


def measure_size(run, size, config, rows):
    """Measure one size, {name: Row}, and save the result after each row."""
    run.require_time()
    device = run.device
    precision, tflop = llama.precision_name(config, device), hardware.model_tflops(config)
    result = {"config": dataclasses.asdict(config), "precision": precision, "tflop_per_step": tflop, "rows": {}}
    result["gate"] = gate = check(run, dict.fromkeys(row.implementation for row in rows.values()), config)
    release_all(device)
    run.result["sizes"][size] = result

    def build(name):
        row = rows[name]
        if not gate[row.implementation]["passed"]:
            raise Unavailable(gate[row.implementation]["error"])
        make = functools.partial(make_step, row, config, device)
        return Contender(make, device, row.graph, run.options.steps, WARMUP_STEPS)

    def figures(name, contender, windows):
        peak = hardware.peak_tflops(llama.get_gpu(device.type), "fp8" if is_fp8(name) else precision)
        return summarize(contender.results, windows, config.tokens_per_step, tflop, peak)

    # Captured rows come last, since a capture that fails may leave the device in a bad state.
    for graph in (False, True):
        half = {name: row for name, row in rows.items() if row.graph == graph}
        measure_rows(run, result["rows"], half, Row(OURS, graph=graph).name, build, figures)
    result["rows"] = {name: result["rows"][name] for name in rows}  # in the requested order
    # Only a size that was measured to the end has comparisons, by which the pages know it.
    conclude(result)
    run.save()
    for pair in result["comparisons"]:
        memory = f", {pair['memory_ratio']:.2f} of its memory" if pair["memory_ratio"] else ""
        print(f"{pair['ours']} takes {pair['time_ratio']:.3f} of the time of {pair['peer']}{memory}")
    return {}


COMPARED = "ours, ms|strongest peer|its ms|ours / its time|ours, MiB|its MiB|ours / its memory".split("|")


def range_text(form, middle, low, high):
    return f"{form(middle)} ({form(low)}–{form(high)})"


def comparison_table(sizes):
    """Return the header, the lines and a sentence of ours beside the strongest peer, given {size: its result}.

    Ranges are p20–p80. What was not compared has the reason in the first cell.
    """
    lines, times, memories, ratio = [], [], [], "{:.2f}".format
    for name, size in sizes.items():
        # conclude() has put it first.
        pairs = [pair for pair in size.get("comparisons", ()) if pair["peer"] == size["strongest_peer"]]
        if not pairs:
            errors = [part["error"] for part in (size, *size.get("rows", {}).values()) if part.get("error")]
            reason = cell((errors or ["not measured"])[0]).split(". ")[0]
            lines.append([name, reason, *[""] * (len(COMPARED) - 1)])
            continue
        pair = pairs[0]
        ours, peer = (size["rows"][pair[side]] for side in ("ours", "peer"))
        our_ms, peer_ms = (range_text(number, *map(row["ms"].get, ("median", "p20", "p80"))) for row in (ours, peer))
        our_mib, peer_mib = (number(row["peak_memory_mib"], digits=1) for row in (ours, peer))
        time, memory = pair["time_ratio"], pair["memory_ratio"]
        time_text = range_text(ratio, time, *pair["spread"]) if pair["spread"] else ratio(time)
        memory_text = ratio(memory) if memory else ""
        lines.append([name, our_ms, pair["peer"], peer_ms, time_text, our_mib, peer_mib, memory_text])
        times.append(time)
        memories += [memory] * bool(memory)
    median = f"Median of {len(times)}: {statistics.median(times):.3f} of the time" if times else "Nothing was compared"
    median += f", {statistics.median(memories):.3f} of the memory" if memories else ""
    return ["", *COMPARED], lines, median


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def rows_of(text):
    """The type of --rows: the names of a group, or that of one row."""
    if text not in GROUPS and Row.named(text).implementation not in IMPLEMENTATIONS:
        known = f"a group, {', '.join(GROUPS)}, or {', '.join(IMPLEMENTATIONS)}, each with compile, graph or both"
        raise argparse.ArgumentTypeError(f"there is no row {text!r}: give {known}")
    return GROUPS.get(text, [text])


def parse(argv):
    parser = make_parser("steps", __doc__, seconds=1200)
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="models to measure, also of a sweep (default: all)")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--sweep", choices=SWEEPS, help="models that differ in one size, or in all: fewer rows")
    models.add_argument("--tiny", action="store_true", help="one model that takes seconds; the only one on a CPU")
    help = f"groups ({', '.join(GROUPS)}), or single rows: {', '.join(ROWS)}"
    parser.add_argument("--rows", nargs="+", type=rows_of, metavar="ROW", help=help)
    parser.add_argument("--windows", type=positive, default=7, help="windows a row (default: 7)")
    parser.add_argument("--steps", type=positive, help="steps a window (default: 0.25 s of them)")
    return parser.parse_args(argv)


def sizes_of(options, on_gpu):
    """Return {name: sizes of its Config} of the requested models."""
    if not (on_gpu or options.tiny):
        raise llama.UsageError("the models that are measured need a GPU, and the device is a CPU: use --tiny")
    known = SWEEPS.get(options.sweep) or {name: SIZES[name] for name in SIZES if (name == "tiny") == options.tiny}
    if unknown := set(options.sizes or ()) - known.keys():
        raise llama.UsageError(f"--sizes: there is no {min(unknown)!r}, only {', '.join(map(repr, known))}")
    return {name: known[name] for name in options.sizes or known}


@program("steps.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    on_gpu = device.type == "cuda"
    sizes = sizes_of(options, on_gpu)
    usual = GROUPS.get(options.sweep, GROUPS["sweep"]) if options.sweep else ROWS
    names = sum(options.rows or [], []) or usual
    rows = {name: Row.named(name) for name in names}
    if not (on_gpu or options.rows):
        rows = {name: row for name, row in rows.items() if not (row.compile or row.graph)}
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # what is compiled never runs eagerly in silence
    run = Run("steps", argv, options, device, sweep=options.sweep, peers=versions(*PEERS), sizes={})
    outcomes = {}
    for name, size in sizes.items():
        print(f"\n{name}: {size}", flush=True)
        config = llama.Config(**size, use_amp=on_gpu)
        outcome = run.attempt(functools.partial(measure_size, run, name, config, rows))
        if outcome["error"]:  # such as of the reference, without which no row can be checked
            print(f"    {outcome['error']}", flush=True)
        outcomes[name] = outcome | run.result["sizes"].get(name, {})
    header, lines, median = comparison_table(outcomes)
    print("", *text_table(header, lines), median, sep="\n")
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
