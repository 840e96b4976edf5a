"""Time nanogpt_triton's LayerNorm against F.layer_norm, eager and compiled, over widths 256 to 16384.

    python -m benchmarks.layer_norm                       fp32 and bf16, all widths
    python -m benchmarks.layer_norm --dtypes bf16 --widths 768 4096

The first case of a type is GPT-2's, 12 x 1024 x 768; the others have tensors of 128 MiB. The times are those of
benchmarks.kernels: of the median replay of a graph of calls. Bandwidth counts the least bytes that must be moved: x and
y forward, y_grad, x and x_grad backward. Results are compared with those in higher precision before anything is timed.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import functools
import sys

import torch
import torch.nn.functional as F

if not __package__:
    print("run it from the root as python -m benchmarks.layer_norm", file=sys.stderr)
    sys.exit(2)

from benchmarks.harness import Run, make_parser, measure_calls, print_calls
from benchmarks.kernels import Case, gradients
from measure import work
from measure.command_line import positive, program
from measure.device import kernel_device
from measure.timing import Bench, compile_apart, copy_calls, release
from nanogpt_triton.kernels import triton_layer_norm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = (256, 1024, 4096, 16384)
COPIED = 2**28  # elements, for the ceiling
ROTATION = 2**28  # bytes of the buffers that calls use in rotation, much more than the L2 cache
TENSOR = 2**27  # bytes


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def both_passes(function):
    return gradients(function, 3)


def passes(bench, shape, functions):
    """Yield the three passes of a shape as Cases, for {contender: function that returns its function}."""
    weight, bias = bench.randn(shape[-1]), bench.randn(shape[-1])
    # So many sets of buffers that a call finds none of its own in the cache.
    size = shape[0] * shape[1] * bench.dtype.itemsize
    number = min(8, max(2, -(-ROTATION // (3 * size)))) if bench.on_gpu else 1
    inputs, upstreams = [], []
    for _ in range(number):
        inputs.append([t.detach().requires_grad_() for t in (bench.randn(*shape), weight, bias)])
        upstreams.append([bench.randn(*shape)])
    x, statistic = inputs[0][0], torch.empty(shape[0], device="meta")
    forward = work.layer_norm(x, weight, x, statistic, statistic, bias)
    backward = work.layer_norm_backward(x, x, weight, statistic, statistic, x)
    both = work.Work(forward.bytes + backward.bytes, forward.flop + backward.flop)
    # Both in one call: for it the gradient of y is an input as well.
    peers = {name: lambda f=load: both_passes(f()) for name, load in functions.items()}
    arguments = [[*own, *grads] for own, grads in zip(inputs, upstreams, strict=True)]
    case = functools.partial(Case, bench, unit="TB/s", size="", ours=[])
    yield case("forward", work=forward, function=torch_layer_norm, inputs=inputs, upstreams=[], peers=functions)
    yield case(
        "backward", work=backward, function=torch_layer_norm, inputs=inputs, upstreams=upstreams, peers=functions
    )
    plain = both_passes(torch_layer_norm)
    yield case("forward + backward", work=both, function=plain, inputs=arguments, upstreams=[], peers=peers)


def measure_shape(run, bench, label, shape, with_compile):
    """Return the fields of a shape: {pass: {contender: {"us", "rate", "error"}}}."""
    run.require_time()
    functions = {"triton": lambda: triton_layer_norm, "torch": lambda: torch_layer_norm}
    if with_compile:
        functions["compile"] = functools.cache(lambda: compile_apart(torch_layer_norm, True, dynamic=False))
    measured = {}
    for case in passes(bench, shape, functions):
        measured[case.name] = measure_calls(run, bench, case.work.bytes, case.contenders)
        print_calls(f"{label} {case.name}", case.unit, measured[case.name])
    return {"shape": list(shape), "passes": measured}


def parse(argv):
    parser = make_parser("layer_norm", __doc__, seconds=480)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--widths", nargs="+", type=positive, default=list(WIDTHS), metavar="N")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled F.layer_norm")
    return parser.parse_args(argv)


@program("layer_norm.py")
def main(argv):
    options = parse(argv)
    device = kernel_device()
    torch.manual_seed(0)
    bench = Bench(device)
    run = Run("layer_norm", argv, options, device, copy_rate=None, cases=[])
    if bench.on_gpu:
        calls, amount = copy_calls(bench, COPIED)
        copy = measure_calls(run, bench, amount, {"torch": lambda: calls})
        run.result["copy_rate"] = copy["torch"]["rate"]
        print_calls("read and write", "TB/s", copy)
        del calls
    tensor = TENSOR if bench.on_gpu else 2**13
    for dtype in options.dtypes:
        bench.dtype = DTYPES[dtype]
        shapes = {"GPT-2": (12 * 1024 if bench.on_gpu else 12, 768)}
        shapes |= {f"N = {n}": (max(1, tensor // bench.dtype.itemsize // n), n) for n in options.widths}
        for name, shape in shapes.items():
            label = f"{dtype} {name}"
            measure = functools.partial(measure_shape, run, bench, label, shape, not options.no_compile)
            entry = {"dtype": dtype, "case": name} | run.attempt(measure)
            if entry["error"]:
                print(f"{label}: {entry['error']}", flush=True)
            run.result["cases"].append(entry)
            run.save()
            release(device)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
