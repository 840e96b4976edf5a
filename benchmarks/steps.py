"""Time whole training steps (forward, backward, optimizer) of several implementations side by side, in one process.

    python -m benchmarks.steps                                every size and row, bf16
    python -m benchmarks.steps --sizes small --rows "triton graph" "sdpa compile graph"
    python -m benchmarks.steps --sweep length         how the cost grows; also width, vocab
    TRITON_INTERPRET=1 python -m benchmarks.steps --tiny      a small model, also on a CPU

A row is an implementation, eager or compiled, launched kernel by kernel or as one captured graph. Loss and gradients
are checked first: an implementation that fails is not timed. Then each row is timed in windows that alternate with
those of our own kernels, so that both see the same state of the machine. README.md in this folder explains the result.

Exit codes: 0 done, 1 an implementation's gradients are wrong, 2 the request cannot be met, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

if not __package__:
    print("run it from the root as python -m benchmarks.steps", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.accuracy import require_finite
from measure.command_line import Parser, positive, program, time_limit
from measure.device import synchronize
from measure.heartbeat import Heartbeat
from measure.results import RESULTS, ResultFile, Unavailable, describe, header, import_library, versions
from measure.timing import in_turns, percentiles, release
from measure.work import SIZES, SWEEPS
from tiny_llama import fp8, hardware

WARMUP_STEPS = 4
WINDOW_SECONDS = 0.25
UNCOUNTED = 4  # windows, until clock and power are those of steady work
OURS = "triton"


class Row(NamedTuple):
    implementation: str
    compile: bool = False
    graph: bool = False

    @property
    def name(self):
        return self.implementation + " compile" * self.compile + " graph" * self.graph


# In the order of measuring. Ours comes first in either half, since the others are timed against it. Captured rows come
# last, since a capture that fails may leave the device in a bad state.
ROWS = {
    row.name: row
    for row in (
        Row(OURS),
        Row("torch"),
        Row("torch", compile=True),
        Row("sdpa"),
        Row("sdpa", compile=True),
        Row("hf"),
        Row("hf liger"),
        Row("hf liger fused"),
        Row(f"hf {OURS}"),
        Row(OURS, graph=True),
        Row("torch", graph=True),
        Row("torch", compile=True, graph=True),
        Row("sdpa", graph=True),
        Row("sdpa", compile=True, graph=True),
        Row("hf", compile=True, graph=True),
        Row("hf liger", compile=True, graph=True),
        Row("sdpa max-autotune", compile=True, graph=True),
        Row("sdpa fa4", compile=True, graph=True),
        Row("sdpa flat", compile=True, graph=True),
        Row("sdpa bf16", compile=True, graph=True),
        Row(f"{OURS} fp8", graph=True),
        Row("sdpa tensorwise", compile=True, graph=True),
        Row("sdpa rowwise", compile=True, graph=True),
        Row("sdpa rowwise_with_gw_hp", compile=True, graph=True),
    )
}
# These separate the effects of kernels, optimizer and precision. They are no peers: one has our kernels, one our
# optimizer, one bf16 weights.
YARDSTICKS = (f"hf {OURS}", "sdpa flat", "sdpa bf16")
PEERS = "transformers", "liger_kernel", "flash_attn", "torchao"
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SWEEP_ROWS = ["torch graph", "sdpa compile graph", "sdpa fa4 compile graph", f"{OURS} graph"]

# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's LLaMA with our sizes and initial weights

HF_SIZES = dict(hidden_dim="hidden_size", ffn_dim="intermediate_size", num_layers="num_hidden_layers",
                num_heads="num_attention_heads", num_kv_heads="num_key_value_heads", vocab_size="vocab_size",
                norm_eps="rms_norm_eps")  # fmt: skip
HF_NAMES = {  # {our module: the modules whose weights it stacks}
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
    """layers.3.attention.qkv_proj.weight -> model.layers.3.self_attn.q_proj.weight and so on"""
    prefix, module = "", name.removesuffix(".weight")
    if module.startswith("layers."):
        _, index, module = module.split(".", 2)
        prefix = f"model.layers.{index}."
    return [f"{prefix}{counterpart}.weight" for counterpart in HF_NAMES[module]]


@torch.no_grad()
def copy_to_hugging_face(weights, model):
    """Copies {name of our parameter: tensor} into a LlamaForCausalLM."""
    theirs = dict(model.named_parameters())
    for name, weight in weights.items():
        parts = [theirs.pop(hf_name) for hf_name in hf_names(name)]
        for part, value in zip(parts, weight.split([len(part) for part in parts]), strict=True):
            part.copy_(value)
    if theirs:
        raise RuntimeError(f"no counterpart of {', '.join(theirs)}")


class HuggingFaceLlama(nn.Module):
    """LlamaForCausalLM with the interface of our model: tokens and targets -> mean loss."""

    pristine = None  # the contents of modeling_llama, which Liger patches

    def __init__(self, config, weights, liger=False, fused=False, ours=False):
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
        self.fused_cross_entropy = None  # Liger's, from hidden states and head, which never keeps all logits
        if liger:
            self.use_liger(fused, config.graph)
        if ours:
            from tiny_llama import hugging_face

            hugging_face.swap_kernels(self.llama)
            self.cross_entropy = hugging_face.cross_entropy
        self.llama.train()
        copy_to_hugging_face(weights, self.llama)

    def use_liger(self, fused, captured):
        liger = import_library("liger_kernel.transformers")
        # A patch of the cross-entropy would be for all rows. Liger's cannot be captured, as the host waits for it.
        liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, cross_entropy=False, model=self.llama)
        self.cross_entropy = F.cross_entropy if captured else liger.LigerCrossEntropyLoss()
        self.fused_cross_entropy = liger.LigerFusedLinearCrossEntropyLoss() if fused else None

    def gradients(self, names):
        """The gradients under the names of our parameters."""
        theirs = dict(self.llama.named_parameters())
        return {name: torch.cat([theirs[hf_name].grad for hf_name in hf_names(name)]) for name in names}

    def forward(self, tokens, targets):
        if self.fused_cross_entropy:
            hidden = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state
            return self.fused_cross_entropy(self.llama.lm_head.weight, hidden.flatten(0, 1), targets.flatten())
        logits = self.llama(input_ids=tokens, use_cache=False).logits
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFaceStep(llama.TrainStep):
    """The training step of --impl torch with Hugging Face's model."""

    def __init__(self, config, device, **variant):
        super().__init__(dataclasses.replace(config, impl="torch"), device)
        weights = dict(self.model.named_parameters())
        self.names = list(weights)
        with torch.device(device.type):
            self.model = HuggingFaceLlama(config, weights, **variant)
        self.initial_weights = [p.detach().cpu().clone() for p in self.model.parameters()]
        self.optimizer = llama.TorchAdamW(self.model, config.learning_rate)
        self.run_model = torch.compile(self.model) if config.compile else self.model

    def gradients(self):
        return self.model.gradients(self.names)


class FlatStep(llama.TrainStep):
    """PyTorch's model with our optimizer, which differs from ours only in the kernels."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.optimizer = llama.FlatAdamW(self.model, config.learning_rate, config.use_amp)

    def backward(self):
        super().backward()
        parameters = self.optimizer.parameters
        with torch.no_grad():  # in one or two launches instead of one for each gradient
            torch._foreach_copy_([p.main_grad for p in parameters], [p.grad for p in parameters])
        for p in parameters:
            p.grad = p.main_grad


class AutotunedStep(llama.TrainStep):
    """PyTorch's model, for whose compiled kernels the fastest of many configurations is searched, in minutes."""

    def __init__(self, config, device):
        super().__init__(dataclasses.replace(config, compile=False), device)
        self.run_model = torch.compile(self.model, mode="max-autotune-no-cudagraphs") if config.compile else self.model


class FlashAttentionStep(llama.TrainStep):
    """PyTorch's model with FlashAttention 4, for NVIDIA's GPUs from Hopper on."""

    def __init__(self, config, device):
        super().__init__(config, device)
        # torch.compile cannot look into its compiler. Captured, the parts of the graph cost no launches.
        self.flash_attention = torch.compiler.disable(import_library("flash_attn.cute").flash_attn_func)
        for layer in self.model.layers:
            layer.attention.forward = functools.partial(self.attend, layer.attention)

    def attend(self, module, x, cos, sin):
        q, k, v = llama.split_heads(F.linear(x, module.qkv_proj.weight), module.num_heads, module.num_kv_heads)
        q, k = (llama.torch_rope(t, cos, sin) for t in (q, k))
        return F.linear(self.flash_attention(q, k, v, causal=True)[0].flatten(2), module.o_proj.weight)


class LowPrecisionStep(llama.TrainStep):
    """PyTorch's model and optimizer with weights and moments in bf16, the least work that PyTorch can do.

    Updates below half a bit of a bf16 weight are lost, so that it trains worse. Its gradients are checked like others.
    """

    def __init__(self, config, device):
        super().__init__(config, device)
        if not config.use_amp:
            raise Unavailable("weights in bf16 are for --use-amp")
        for p in self.model.parameters():  # the rotary embedding's tables stay in fp32
            p.data = p.data.bfloat16()
        self.optimizer = llama.TorchAdamW(self.model, config.learning_rate)


def call(x, projection):
    return projection(x)


class TorchaoStep(llama.TrainStep):
    """PyTorch's model with torchao's products in FP8 by one of TORCHAO_RECIPES, of the same weights as ours."""

    def __init__(self, config, device, recipe):
        super().__init__(config, device)
        float8 = import_library("torchao.float8")
        recipe = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(self.model.layers, config=recipe)
        for layer in self.model.layers:  # it converts modules, and our operations take weights
            layer.attention.forward = functools.partial(self.attend, layer.attention)
            layer.feed_forward.forward = functools.partial(self.feed_forward, layer.feed_forward)

    @staticmethod
    def attend(module, x, cos, sin):
        heads = module.num_heads, module.num_kv_heads
        return llama.sdpa_attention(x, module.qkv_proj, module.o_proj, cos, sin, *heads, linear=call)

    @staticmethod
    def feed_forward(module, x):
        return llama.torch_swiglu(x, module.gate_up_proj, module.down_proj, linear=call)


def is_fp8(implementation):
    return not {"fp8", *TORCHAO_RECIPES}.isdisjoint(implementation.split())


def make_step(row, config, device):
    if (row.graph or row.compile) and device.type == "cpu":
        raise Unavailable("needs a GPU")
    config = dataclasses.replace(config, compile=row.compile, graph=row.graph)
    implementation, *variant = row.implementation.split()
    if implementation == "hf":
        if OURS in variant and (obstacle := llama.triton_obstacle(device)):
            raise Unavailable(obstacle)
        variant = dict(liger="liger" in variant, fused="fused" in variant, ours=OURS in variant)
        return HuggingFaceStep(config, device, **variant)
    if is_fp8(row.implementation) and not (config.use_amp and fp8.formats_of(device.arch)):
        raise Unavailable(f"FP8 is for bf16, and for a GPU that has it ({device.arch})")
    obstacle = llama.triton_obstacle(device, config.use_amp) if OURS == implementation or "flat" in variant else None
    if obstacle:
        raise Unavailable(obstacle)
    config = dataclasses.replace(config, impl=implementation, fp8="fp8" in variant)
    if variant and variant[0] in TORCHAO_RECIPES:
        return TorchaoStep(config, device, variant[0])
    steps = {"flat": FlatStep, "bf16": LowPrecisionStep, "max-autotune": AutotunedStep, "fa4": FlashAttentionStep}
    return steps.get("".join(variant), llama.TrainStep)(config, device)  # the last is also that of FP8


# ----------------------------------------------------------------------------------------------------------------------
# The gate checks loss and gradients of each implementation by the rule of tiny_llama_v3.py --check.


def loss_and_gradients(implementation, config, device, batch):
    """Like llama.loss_and_gradients for any implementation, under the names of our parameters."""
    step = make_step(Row(implementation), config, device)
    step.load(*batch)
    step.forward()
    step.backward()
    named = step.model.named_parameters()
    gradients = step.gradients() if isinstance(step, HuggingFaceStep) else {name: p.grad for name, p in named}
    return {"loss": step.loss.detach().double(), **gradients}


def check(implementations, config, device):
    """{implementation: the entry of the gate in the result}"""
    config = dataclasses.replace(config, batch_size=min(config.batch_size, llama.CHECK_BATCH))
    batch = next(llama.batches(config))
    exact = llama.exact_loss_and_gradients(config, device, batch)
    release_all(device)

    @functools.cache
    def plain_errors(in_fp8):
        plain = dataclasses.replace(config, impl="torch", fp8=in_fp8)
        return llama.relative_errors(llama.loss_and_gradients(plain, device, batch), exact)

    gates = {}
    for implementation in implementations:
        release_all(device)
        try:
            errors = allowed = plain_errors(is_fp8(implementation))
            if implementation != "torch":
                errors = llama.relative_errors(loss_and_gradients(implementation, config, device, batch), exact)
        except Exception as error:  # the other implementations can still be measured
            gates[implementation] = {"passed": False, "error": describe(error)}
            continue
        tolerance = llama.CHECK_ATOL[llama.precision_name(config, device)]
        gates[implementation] = gate(llama.judge(errors, allowed, tolerance))
    return gates


def gate(verdict):
    failed, worst, error = verdict.failed, verdict.worst, verdict.errors[verdict.worst]
    wrong = f"wrong gradients: {len(failed)} of {len(verdict.errors)} differ, {worst} the most"
    return {
        "passed": not failed,
        "error": wrong if failed else None,
        "worst": worst,
        "relative_error": error if math.isfinite(error) else None,  # JSON has no infinity
        "allowed": verdict.allowed[worst],
    }


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def release_all(device):
    """Like timing.release(), and frees compiled code and cuBLAS workspaces, so that each contender has its own."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    torch.compiler.reset()
    release(device)


def begin_measuring(step, device, graph):
    """After the warm-up, resets the weights and the peak memory, and with graph captures the step."""
    step.restart()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if graph:
        step.capture(one_graph=True)


class Contender:
    """A training step that is built, warmed up and captured, with its peak memory and compile time."""

    def __init__(self, row, config, device, steps):
        self.row, self.device = row, device
        self.results = {}
        on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0
        self.step = make_step(row, config, device)
        self.step.load(*next(llama.batches(config)))
        synchronize(device)
        start = time.perf_counter()
        # A captured step must have been warmed up on another stream than the default one.
        with torch.cuda.stream(torch.cuda.Stream()) if row.graph else contextlib.nullcontext():
            for index in range(WARMUP_STEPS):
                self.step.run()
                synchronize(device)
                if index == 0:
                    self.results["first_loss"] = self.step.loss.item()
                    first_seconds = time.perf_counter() - start
        self.results["compile_seconds"] = first_seconds if row.compile else None
        begin_measuring(self.step, device, row.graph)
        self.window(1)
        step_ms, _ = self.window(2)
        self.results["peak_memory_mib"] = llama.peak_memory_mib(device) - before if on_gpu else None
        self.steps = steps or max(2, min(1000, math.ceil(WINDOW_SECONDS * 1e3 / step_ms)))

    def window(self, steps=None):
        """The ms of a step with a fixed batch, by the device's clock and by the host's."""
        steps = steps or self.steps
        clock = llama.StepClock(self.device, unsynced=False)
        synchronize(self.device)
        start = time.perf_counter()
        clock.mark()
        for _ in range(steps):
            self.step.run()
        clock.mark()
        synchronize(self.device)
        wall_ms = (time.perf_counter() - start) * 1e3
        require_finite(self.step.loss.item())
        return clock.intervals()[0] / steps, wall_ms / steps


def time_in_turns(contenders, num_windows):
    """The windows of each contender, which are timed in turns."""
    for contender in contenders:
        contender.window(1)  # allocates the memory that release_all() freed
    windows = [contender.window for contender in contenders]
    in_turns(windows, UNCOUNTED)
    return in_turns(windows, num_windows)


def summarize(contender, windows, config, reference=None, reference_windows=None):
    """The row of the result; ratio is our time divided by theirs, for each window."""
    ms = [device_ms for device_ms, _ in windows]
    time_ms = percentiles(ms)
    tflops_per_second = hardware.model_tflops(config) / (time_ms["median"] / 1e3)
    precision = "fp8" if is_fp8(contender.row.implementation) else llama.precision_name(config, contender.device)
    peak = hardware.peak_tflops(contender.device, precision)
    row = {
        **contender.results,
        "steps_per_window": contender.steps,
        "windows_ms": ms,
        "windows_wall_ms": [wall_ms for _, wall_ms in windows],
        "ms": time_ms,
        "samples_per_second": config.batch_size / time_ms["median"] * 1e3,
        "tokens_per_second": config.tokens_per_step / time_ms["median"] * 1e3,
        "tflops_per_second": tflops_per_second,
        "mfu": tflops_per_second / peak if peak else None,
    }
    if reference:
        row["reference"] = reference.row.name
        row["reference_windows_ms"] = [device_ms for device_ms, _ in reference_windows]
        pairs = zip(row["reference_windows_ms"], ms, strict=True)
        row["ratio"] = percentiles([ours / theirs for ours, theirs in pairs])
    return row


def measure_half(rows, config, device, verdicts, options, deadline, record):
    """Measures the eager or the captured rows, and calls record(row, result) for each."""
    reference, reference_windows = None, []
    for row in rows:
        contender = None
        try:
            if not verdicts[row.implementation]["passed"]:
                raise Unavailable(verdicts[row.implementation]["error"])
            if time.monotonic() > deadline:
                raise Unavailable(f"not started within --time-limit {options.time_limit}")
            # Restores the current stream after a failed capture.
            with torch.cuda.stream(torch.cuda.default_stream()) if device.type == "cuda" else contextlib.nullcontext():
                contender = Contender(row, config, device, options.steps)
                if row.implementation == OURS:
                    reference = contender
                    continue
                if reference:
                    ours, theirs = time_in_turns([reference, contender], options.windows)
                    reference_windows += ours
                    record(row, summarize(contender, theirs, config, reference, ours))
                else:
                    record(row, summarize(contender, *time_in_turns([contender], options.windows), config))
        except Exception as error:  # the other rows can still be measured
            record(row, {"error": describe(error)})
        finally:
            contender = None
            release_all(device)
    if reference:
        try:
            if not reference_windows:  # no other row was measured
                (reference_windows,) = time_in_turns([reference], options.windows)
            record(reference.row, summarize(reference, reference_windows, config))
        except Exception as error:
            record(reference.row, {"error": describe(error)})
    reference = None
    release_all(device)


def compare_rows(ours, peer, rows):
    """Our time and memory divided by the peer's; if they were timed in turns, the time for each window, with spread."""
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
    """Finds the strongest peer, in bf16 and in FP8, and compares ours with it and with plain eager PyTorch."""
    rows = {name: row for name, row in result["rows"].items() if row["error"] is None}

    def strongest_peer(in_fp8):
        peers = {name: ROWS[name].implementation for name in rows}
        own = OURS, f"{OURS} fp8", *YARDSTICKS
        names = [name for name, peer in peers.items() if peer not in own and is_fp8(peer) == in_fp8]
        return min(names, key=lambda name: rows[name]["ms"]["median"], default=None)

    result["strongest_peer"] = strongest_peer(False)
    ours = next((name for name in (f"{OURS} graph", OURS) if name in rows), None)
    in_fp8 = f"{OURS} fp8 graph"
    pairs = [(ours, result["strongest_peer"]), (OURS, "torch"), (in_fp8, strongest_peer(True)), (in_fp8, ours)]
    pairs = [pair for pair in dict.fromkeys(pairs) if all(name in rows for name in pair)]
    result["comparisons"] = [compare_rows(*pair, rows) for pair in pairs]


def measure_size(config, rows, device, options, deadline, save):
    """Measures one size, and calls save(result) after each row."""
    result = {
        "config": dataclasses.asdict(config),
        "precision": llama.precision_name(config, device),
        "tflop_per_step": hardware.model_tflops(config),
        "peak_tflops": hardware.peak_tflops(device, llama.precision_name(config, device)),
        "gate": {},
        "rows": {},
    }
    implementations = list(dict.fromkeys(row.implementation for row in rows))
    try:
        result["gate"] = check(implementations, config, device)
    except Exception as error:  # without a reference no row can be checked
        reason = f"no reference: {describe(error)}"
        result["gate"] = {name: {"passed": False, "error": reason} for name in implementations}
    release_all(device)
    for name, verdict in result["gate"].items():
        print(f"    gate {name:9} {verdict['error'] or 'passed'}", flush=True)

    def record(row, measured):
        result["rows"][row.name] = {**row._asdict(), "error": None, **measured}
        line = measured.get("error") or f"{measured['ms']['median']:.3f} ms"
        print(f"    {row.name:20} {line}", flush=True)
        save(result)

    for graph in (False, True):
        half = [row for row in rows if row.graph == graph]
        measure_half(half, config, device, result["gate"], options, deadline, record)
    result["rows"] = {row.name: result["rows"][row.name] for row in rows}  # in the requested order
    conclude(result)
    save(result)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Report


def print_table(name, result):
    config = llama.Config(**result["config"])
    print(
        f"\n{name}: {config.batch_size} x {config.seq_len} tokens, hidden {config.hidden_dim}, "
        f"{config.num_layers} layers, {config.num_heads} heads ({config.num_kv_heads} kv), {result['precision']}"
    )
    columns = f"{'ms':>9} {'p20':>9} {'p80':>9} {'ours/it':>8} {'tokens/s':>11} {'TFLOP/s':>8} {'MFU':>6} {'MiB':>8}"
    print(f"{'':20} {columns}")
    for row_name, row in result["rows"].items():
        if row["error"]:
            print(f"{row_name:20} {row['error']}")
            continue
        ms = row["ms"]
        ratio = f"{row['ratio']['median']:.3f}" if "ratio" in row else ""
        mfu = f"{100 * row['mfu']:.1f}%" if row["mfu"] else ""
        memory = f"{row['peak_memory_mib']:.0f}" if row["peak_memory_mib"] else ""
        print(
            f"{row_name:20} {ms['median']:9.3f} {ms['p20']:9.3f} {ms['p80']:9.3f} {ratio:>8} "
            f"{row['tokens_per_second']:11,.0f} {row['tflops_per_second']:8.2f} {mfu:>6} {memory:>8}"
        )
    for pair in result["comparisons"]:
        memory = f", {pair['memory_ratio']:.2f} of its memory" if pair["memory_ratio"] else ""
        print(f"{pair['ours']} takes {pair['time_ratio']:.3f} of the time of {pair['peer']}{memory}")


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse(argv):
    parser = Parser("steps.py", __doc__)
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="models to measure, also of a sweep (default: all)")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--sweep", choices=SWEEPS, help="models that differ in one size only, fewer rows")
    models.add_argument("--tiny", action="store_true", help="one model that takes seconds; the only one on a CPU")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--use-amp", action=argparse.BooleanOptionalAction, help="compute in bf16 (default: on a GPU)")
    parser.add_argument("--matmul-precision", choices=("highest", "high"), default="highest", help="full fp32, or TF32")
    parser.add_argument("--windows", type=positive, default=7, help="windows a row (default: 7)")
    parser.add_argument("--steps", type=positive, help=f"steps a window (default: {WINDOW_SECONDS} s of them)")
    parser.add_argument("--time-limit", type=time_limit, default=1200, metavar="S", help="for starting rows (1200)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


def sizes_of(options, on_gpu):
    """{name: sizes of its Config} of the requested models."""
    if not on_gpu and (options.sizes or options.sweep):
        asked = f"--sweep {options.sweep}" if options.sweep else f"--sizes {' '.join(options.sizes)}"
        raise llama.UsageError(f"{asked} needs a GPU, and the device is a CPU: use --tiny")
    is_tiny = options.tiny or not on_gpu
    known = SWEEPS.get(options.sweep) or {name: SIZES[name] for name in SIZES if (name == "tiny") == is_tiny}
    for name in options.sizes or ():
        if name not in known:
            raise llama.UsageError(f"--sizes: there is no {name!r}, only {', '.join(map(repr, known))}")
    return {name: known[name] for name in options.sizes or known}


@program("steps.py")
def main(argv):
    start = time.monotonic()
    options = parse(argv)
    deadline = start + options.time_limit
    device = llama.select_device(options.device)
    on_gpu = device.type == "cuda"
    sizes = sizes_of(options, on_gpu)
    folder = llama.writable_folder("--output-dir", options.output_dir)
    every_row = SWEEP_ROWS if options.sweep else list(ROWS)
    names = options.rows or [name for name in every_row if on_gpu or not (ROWS[name].compile or ROWS[name].graph)]
    rows = [row for name, row in ROWS.items() if name in names]
    if not on_gpu and not options.tiny:
        print("There is no GPU: only the tiny model is measured.")
    use_amp = on_gpu if options.use_amp is None else options.use_amp
    torch.set_float32_matmul_precision(options.matmul_precision)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # what is compiled never runs eagerly in silence

    result = header("steps", device, argv)
    result |= {"sweep": options.sweep, "peers": versions(*PEERS), "windows": options.windows, "sizes": {}}
    file = ResultFile(folder, result)
    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}", flush=True)
    for name, size in sizes.items():
        config = llama.Config(**size, use_amp=use_amp, matmul_precision=options.matmul_precision)
        print(f"\n{name}", flush=True)

        def save(measured, name=name):
            # After a row: what a failed backward pass has kept stays queued in this thread until there is another one.
            torch.zeros((), requires_grad=True).backward()
            result["sizes"][name] = measured
            result["seconds"] = round(time.monotonic() - start, 1)
            file.save(result)

        with Heartbeat(f"measuring {name}"):
            measured = measure_size(config, rows, device, options, deadline, save)
        print_table(name, measured)
    print(f"\nResults: {file.path}")
    verdicts = [verdict for size in result["sizes"].values() for verdict in size["gate"].values()]
    return 1 if any("worst" in verdict and not verdict["passed"] for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
