"""Train a model on a text for minutes, with our kernels and then with PyTorch: the losses, the speed, what it learnt.

    python -m benchmarks.training --data FILE                     480 s with our kernels, then 120 s with PyTorch
    python -m benchmarks.training --data FILE --save FOLDER       keep the trained model
    python -m benchmarks.training --data FILE --tiny              a small model for seconds, also on a CPU

The model has the layers of SmolLM-135M and a vocabulary of 256 bytes. A step has 16 x 1,024 bytes, in bf16, and is
captured in one graph; gradients are clipped, and the learning rate follows half a cosine after a warm-up. How many
steps fit into --seconds is decided once, from the time of a few. PyTorch (`sdpa compile graph` of benchmarks.steps)
trains the first --peer-seconds of the same steps: weights, batches and learning rates are the same.

Then the loss is measured on the last tenth of the text, which is held out. The library transformers, where it is
installed, loads the saved model: its logits are compared with ours in fp32, and it continues a part of that tenth.
Ctrl-C keeps what was measured so far. README.md in this folder explains the result.

Exit codes: 0 done, 1 our training failed, a run diverged or the logits differ, 2 the request cannot be met, 130
interrupted.
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.training", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import harness
from benchmarks.steps import ANCHOR, OURS, Row
from measure.command_line import program, time_limit
from measure.device import synchronize
from measure.results import import_library, versions
from measure.work import SHAPES, SIZES
from tiny_llama import checkpoint, data
from tiny_llama.files import printable

TINY = "tiny"
MODELS = {
    "SmolLM-135M": SHAPES["SmolLM-135M"] | dict(batch_size=16, vocab_size=256),
    TINY: SIZES[TINY] | dict(vocab_size=256),
}
TRAINING = dict(learning_rate=1e-3, schedule="cosine", warmup_fraction=0.05, clip=1.0, seed=42)
SECONDS = {"seconds": (480.0, 2.0), "peer_seconds": (120.0, 1.0)}  # without and with --tiny
MOST_POINTS = 400  # of a curve
PROGRESS_SECONDS = 10
FIRST_STEPS = 100  # in which only rounding tells two runs apart
LOGIT_TOLERANCE = 1e-3  # relative to the largest; in fp32 the order of additions makes less than a tenth of it
PROMPT, PROMPT_BYTES, SAMPLE_BYTES, TEMPERATURE = b"def ", 32, 400, 0.8


def build(row, config, device):
    """Return the TrainStep of a Row, with a batch. Without Triton ours is plain PyTorch, as in the script."""
    config = dataclasses.replace(config, impl=row.implementation, compile=row.compile, graph=row.graph)
    step = llama.TrainStep(config, device)
    step.load(*next(llama.batches(config)))
    return step


def on_device(batch, device):
    """Return a batch on the device. The copy waits behind the steps before it, and the host does not."""
    if device.type == "cpu":
        return batch
    return [t.contiguous().pin_memory().to(device, non_blocking=True) for t in batch]


def train_in_parts(step, size):
    """Train all steps of step.config; yield the losses of each `size` of them and the seconds since the beginning.

    The seconds are those of the device's clock, and leave out nothing. The host waits for the device once a part.
    """
    batches, clock, seconds = llama.batches(step.config), llama.StepClock(step.device, unsynced=False), 0.0
    synchronize(step.device)
    clock.mark()
    for begin in range(0, step.config.num_steps, size):
        losses = []
        for number in range(begin, min(begin + size, step.config.num_steps)):
            step.load(*on_device(next(batches), step.device))
            step.follow_schedule(number)
            step.run()
            losses.append(step.loss.detach().clone())  # a replay overwrites its loss
        clock.mark()
        synchronize(step.device)
        seconds += clock.intervals()[0] / 1e3
        del clock.marks[0]  # the end of a part is the beginning of the next one
        yield torch.stack(losses).tolist(), seconds


def loss_difference(ours, theirs):
    """Return how far losses of the same steps are apart: at most in the first steps, and on average in all of them."""
    apart = [abs(our - their) for our, their in zip(ours, theirs, strict=False)]
    first = apart[:FIRST_STEPS]
    return {"steps": len(apart), "mean": statistics.fmean(apart), "first_steps": len(first), "largest": max(first)}


class Run(harness.Run):
    """A run of this benchmark: two rows that train the same, and the saved model in transformers."""

    def __init__(self, argv, options, device, config, model):
        self.config, self.losses, self.weights = config, {}, None
        fields = dataclasses.asdict(config) | {"data": Path(config.data).name, "save": None}
        super().__init__(
            "training",
            argv,
            options,
            device,
            peers=versions("transformers"),
            model=model,
            precision=llama.precision_name(config, device),
            config=fields,
            data={"name": Path(config.data).name, "bytes": os.path.getsize(config.data)},
            rows={},
        )

    def prepare(self, row):
        """Build, warm up and capture a Row; return its Contender, with the row in the result."""
        steps = 1 if self.options.tiny else None
        contender = harness.Contender(
            functools.partial(build, row, self.config, self.device), self.device, row.graph, steps
        )
        self.result["rows"][row.name] |= {
            "implementation": contender.step.implementation,
            "peak_memory_mib": contender.results["peak_memory_mib"],
        }
        return contender

    def train(self, name, step, limit=math.inf):
        """Train until all steps are done or a part ends after `limit` seconds; the row of the result grows with it."""
        config, row, losses = step.config, self.result["rows"][name], self.losses.setdefault(name, [])
        curve = row["curve"] = {"step": [], "seconds": [], "loss": []}
        shown = 0.0  # seconds at the last line
        for part, seconds in train_in_parts(step, llama.cdiv(config.num_steps, MOST_POINTS)):
            loss = statistics.fmean(part)
            if not math.isfinite(loss):
                raise ArithmeticError(f"the run diverged in the steps {len(losses) + 1} to {len(losses) + len(part)}")
            losses += part
            point = {"step": len(losses), "seconds": round(seconds, 3), "loss": round(loss, 5)}
            for key, value in point.items():
                curve[key].append(value)
            ms = seconds * 1e3 / len(losses)
            row |= {"steps": len(losses), "ms": ms, "tokens_per_second": config.tokens_per_step / ms * 1e3}
            row |= {"first_loss": losses[0], "final_loss": point["loss"]}
            is_last = len(losses) == config.num_steps or seconds >= limit
            if is_last or seconds >= shown + PROGRESS_SECONDS:
                shown = seconds
                place = f"step {len(losses)}/{config.num_steps}"
                print(f"{name:18} {place} | loss {loss:.4f} | {seconds:.1f} s", flush=True)
                self.save()
            if is_last:
                return

    def measure_row(self, row, measure):
        """Put a row into the result and let measure(row) fill it. Return whether it could; if not, the row says why."""
        self.result["rows"][row.name] = fields = row._asdict()
        fields |= self.attempt(functools.partial(measure, row))
        harness.release_all(self.device)
        if fields["error"]:
            print(f"{row.name:18} {fields['error']}", flush=True)
        self.save()
        return fields["error"] is None

    def measure_ours(self, row):
        """Decide how many steps there are, train them all, and save the model."""
        contender = self.prepare(row)
        # The last window is of steady clocks.
        ms = [contender.window() for _ in range(harness.UNCOUNTED)][-1]
        num_steps = max(1, round(self.options.seconds * 1e3 / ms))
        self.config = dataclasses.replace(self.config, num_steps=num_steps)
        self.result |= {"num_steps": num_steps, "timed_ms": ms}
        self.result["config"]["num_steps"] = num_steps
        step = contender.step
        self.result["parameters"] = llama.count_weights(step.model.parameters())
        print(f"{num_steps} steps of {ms:.2f} ms, {self.result['parameters']:,} parameters", flush=True)
        step.config = dataclasses.replace(step.config, num_steps=num_steps)
        step.restart()  # the windows have trained
        self.train(row.name, step)
        held_out = data.held_out_loss(step)
        self.result["rows"][row.name]["held_out_loss"] = held_out
        print(f"{row.name:18} held-out loss {held_out:.4f}, {held_out / math.log(2):.3f} bits a byte", flush=True)
        llama.save_model(step, num_steps)
        self.weights = {name: weight.cpu() for name, weight in step.state_dict().items()}
        return {}

    def measure_peer(self, row):
        """Train the first steps of the same run, and compare the losses."""
        step = self.prepare(row).step
        step.restart()
        self.train(row.name, step, self.options.peer_seconds)
        self.result["loss_difference"] = loss_difference(*self.losses.values())
        return {}

    @torch.no_grad()
    def measure_transformers(self):
        """Load the saved model with transformers: compare a window's logits with ours, and continue a text."""
        transformers = import_library("transformers")
        transformers.utils.logging.disable_progress_bar()
        theirs = transformers.LlamaForCausalLM.from_pretrained(self.config.save).to(self.device).float().eval()
        config = dataclasses.replace(self.config, use_amp=False)
        with self.device:
            ours = llama.TinyLlamaTriton(config, llama.select_operations(config, self.device)[1])
        ours.load_state_dict(self.weights)
        window = data.held_out_batches(config)[0][0][:1].to(self.device)
        our_logits, logits = ours(window), theirs(window).logits
        difference = ((logits - our_logits).abs().max() / our_logits.abs().max()).item()
        is_close = difference <= LOGIT_TOLERANCE  # NaN is not
        self.any_wrong |= not is_close
        print(f"transformers       logits differ by {difference:.1e} of the largest{'' if is_close else ': too much'}")
        held_out = data.read(config)[1][: 2**20].tobytes()
        begin = max(0, held_out.find(PROMPT))
        prompt = held_out[begin : begin + PROMPT_BYTES]
        tokens = torch.tensor([list(prompt)], device=self.device)
        torch.manual_seed(config.seed)
        sampling = dict(do_sample=True, temperature=TEMPERATURE, top_k=0)
        lengths = dict(min_new_tokens=SAMPLE_BYTES, max_new_tokens=SAMPLE_BYTES)
        generated = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **lengths, **sampling)
        text = bytes(generated[0, len(prompt) :].tolist()).decode(errors="replace")
        print(printable(prompt.decode(errors="replace") + text))
        return {"logit_difference": difference, "prompt": prompt.decode(errors="replace"), "text": text}

    def measure(self):
        """Fill the result."""
        ours, peer = Row(OURS, graph=self.on_gpu), Row.named(ANCHOR)
        if not self.on_gpu:
            peer = Row(peer.implementation)
        if not self.measure_row(ours, self.measure_ours):
            self.any_wrong = True
            return
        if self.options.peer_seconds:
            self.measure_row(peer, self.measure_peer)
        outcome = self.attempt(self.measure_transformers)
        if outcome["error"]:
            print(f"transformers       {outcome['error']}", flush=True)
        # With this field the result is complete, by which the pages know it.
        self.result["transformers"] = None if outcome["error"] else outcome


def seconds(text):
    """Convert the text of an option that takes a finite number of seconds."""
    if math.isinf(value := time_limit(text)):
        raise argparse.ArgumentTypeError(f"{text} has no end: give a number of seconds")
    return value


def parse(argv):
    parser = harness.make_parser("training", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="a text, whose bytes are the tokens")
    for name, whose in (("seconds", "our training takes"), ("peer_seconds", "PyTorch trains, 0: not at all")):
        help = "that {} (default: {:g}, with --tiny {:g})".format(whose, *SECONDS[name])
        parser.add_argument(llama.flag_of(name), type=seconds, metavar="SECONDS", help=help)
    parser.add_argument("--save", metavar="FOLDER", help="for the trained model (default: it is not kept)")
    parser.add_argument("--tiny", action="store_true", help="a small model for seconds; the only one on a CPU")
    options = parser.parse_args(argv)
    for name, defaults in SECONDS.items():
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.tiny])
    return options


def check(config, device):
    """Raise UsageError for what cannot be trained, or where the model cannot be saved."""
    if config.data in ("random", "markov") or not data.has_bytes(config):
        raise llama.UsageError(f"--data {config.data} has no bytes to hold out: give a text")
    llama.validate_on_device(config, device)
    obstacle = llama.triton_obstacle(device, config.use_amp)
    if device.type == "cuda" and obstacle:
        raise llama.UsageError(f"our kernels cannot run: {obstacle}")
    checkpoint.require_free(config.save, "--save")


@program("training.py")
def main(argv):
    options, device = parse(argv), llama.select_device("auto")
    on_gpu, model = device.type == "cuda", TINY if options.tiny else next(iter(MODELS))
    if not (on_gpu or options.tiny):
        raise llama.UsageError(f"the layers of {model} need a GPU, and the device is a CPU: use --tiny")
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # what is compiled never runs eagerly in silence
    with tempfile.TemporaryDirectory() as scratch:
        sizes = MODELS[model] | TRAINING
        config = llama.Config(**sizes, use_amp=on_gpu, data=options.data, save=options.save or scratch)
        check(config, device)
        run = Run(argv, options, device, config, model)
        try:
            run.measure()
        except KeyboardInterrupt:  # what was measured so far counts
            run.finish()
            raise
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
