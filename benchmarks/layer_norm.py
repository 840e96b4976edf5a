"""Time nanogpt_triton's LayerNorm against F.layer_norm, eager and compiled, over widths 256 to 16384.

    python -m benchmarks.layer_norm                       fp32 and bf16, all widths
    python -m benchmarks.layer_norm --dtypes bf16 --widths 768 4096

The first case of a type is GPT-2's, 12 x 1024 x 768; the others have tensors of 128 MiB. "us" is device time: of the
median replay of a graph of calls. "wall us" is the time of a call in a loop, including the host. Bandwidth counts the
least bytes that must be moved: x and y forward, y_grad, x and x_grad backward. Results are compared with those in
higher precision before anything is timed.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import functools
import sys
import time

import torch
import torch.nn.functional as F

if not __package__:
    print("run it from the root as python -m benchmarks.layer_norm", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure import work
from measure.accuracy import KERNEL_TOLERANCE, promoted, require
from measure.command_line import Parser, positive, program, time_limit
from measure.device import kernel_device
from measure.results import RESULTS, ResultFile, describe, header
from measure.timing import Bench, compile_apart, copy_calls, gradient_call, release, wall_seconds
from nanogpt_triton.kernels import triton_layer_norm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = (256, 512, 768, 1024, 2048, 4096, 8192, 16384)
WALL_CALLS = 100
COPIED = 2**28  # elements, for the ceiling
ROTATION = 2**28  # bytes of the buffers that calls use in rotation, much more than the L2 cache


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def forward_and_backward(function, x, weight, bias, y_grad):
    # New leaves: autograd keeps the stream on which a leaf was first used, and captured ones need their own.
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(function(*inputs), inputs, y_grad)


def results_of(function, inputs, y_grad):
    gradients = forward_and_backward(function, *inputs, y_grad)
    return dict(zip(("y", "x_grad", "weight_grad", "bias_grad"), (function(*inputs), *gradients), strict=True))


def check(inputs, y_grad):
    """Returns our largest error; ArithmeticError if the rule of measure/accuracy.py does not allow it."""
    rows = min(len(inputs[0]), 4096)
    inputs, y_grad = (inputs[0][:rows], *inputs[1:]), y_grad[:rows]
    exact = results_of(torch_layer_norm, promoted(inputs), *promoted([y_grad]))
    ours, plain = (results_of(function, inputs, y_grad) for function in (triton_layer_norm, torch_layer_norm))
    return max(require(ours, plain, exact, KERNEL_TOLERANCE[y_grad.dtype]).errors.values())


def wall_microseconds(bench, calls):
    """The time of a call in a loop, host and device together."""
    number = WALL_CALLS if bench.on_gpu else 1
    wall_seconds(calls, number, bench.device)
    return wall_seconds(calls, number, bench.device) * 1e6


def measure_case(bench, shape, contenders):
    """{"shape", "worst_error", passes: {pass: {contender: {"us", "rate", "wall_us", "error"}}}}"""
    width = shape[-1]
    size = shape[0] * width * bench.dtype.itemsize
    number = min(8, max(2, -(-ROTATION // (3 * size)))) if bench.on_gpu else 1
    weight, bias = bench.randn(width, dtype=torch.float32), bench.randn(width, dtype=torch.float32)
    if bench.dtype == torch.float16 or bench.dtype == torch.bfloat16:
        weight, bias = weight.to(bench.dtype), bias.to(bench.dtype)  # F.layer_norm needs one type
    sets = [((bench.randn(*shape), weight, bias), bench.randn(*shape)) for _ in range(number)]
    case = {"shape": list(shape), "bytes": size, "worst_error": check(*sets[0]), "passes": {}}
    x, statistic = sets[0][0][0], torch.empty(shape[0], device="meta")
    forward_bytes = work.layer_norm(x, weight, x, statistic, statistic, bias).bytes
    backward_bytes = work.layer_norm_backward(x, x, weight, statistic, statistic, x).bytes
    for name, function in contenders.items():
        forward = [functools.partial(function, *inputs) for inputs, _ in sets]
        both = [functools.partial(forward_and_backward, function, *inputs, y_grad) for inputs, y_grad in sets]
        passes = {"forward": (forward, forward_bytes), "forward + backward": (both, forward_bytes + backward_bytes)}
        try:
            with bench.on_stream():
                leaves = [[t.detach().requires_grad_() for t in inputs] for inputs, _ in sets]
                backward = [gradient_call(function, x, y_grad) for x, (_, y_grad) in zip(leaves, sets, strict=True)]
            passes["backward"] = backward, backward_bytes
        except Exception as error:  # the other contenders can still be measured
            passes["backward"] = error, 0
        for pass_name, (calls, amount) in passes.items():
            measured = bench.rate(calls, amount)
            if not measured["error"] and pass_name != "backward":
                measured["wall_us"] = wall_microseconds(bench, calls)
            case["passes"].setdefault(pass_name, {})[name] = measured
        del forward, both, passes
    return case


def report(name, case, copy_rate):
    for pass_name, measured in case["passes"].items():
        ours, columns = measured["triton"], []
        for contender, row in measured.items():
            if row["error"]:
                columns.append(f"{contender} {row['error'][:50]}")
                continue
            text = f"{contender} {row['us']:.1f} us {row['rate']:.2f} TB/s"
            if contender == "triton":
                text += f" = {100 * row['rate'] / copy_rate:.0f} %" if copy_rate else ""
            elif ours.get("us"):
                text += f" ({row['us'] / ours['us']:.2f}x)"
            columns.append(text + (f" wall {row['wall_us']:.0f}" if "wall_us" in row else ""))
        print(f"{name:22} {pass_name:18} {' | '.join(columns)}", flush=True)


def parse(argv):
    parser = Parser("layer_norm.py", __doc__)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--widths", nargs="+", type=positive, default=list(WIDTHS), metavar="N")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled F.layer_norm")
    parser.add_argument("--time-limit", type=time_limit, default=480, metavar="S", help="for starting cases (480)")
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    return parser.parse_args(argv)


@program("layer_norm.py")
def main(argv):
    start = time.monotonic()
    options = parse(argv)
    device = kernel_device()
    folder = llama.writable_folder("--output-dir", options.output_dir)
    torch.manual_seed(0)
    bench = Bench(device)
    result = header("layer_norm", device, argv) | {"copy_rate": None, "cases": []}
    file = ResultFile(folder, result)
    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}", flush=True)
    if bench.on_gpu:
        calls, amount = copy_calls(bench, COPIED)
        result["copy_rate"] = bench.rate(calls, amount)["rate"]
        del calls
        print(f"read and write: {result['copy_rate']:.2f} TB/s", flush=True)
    all_right = True
    elements = 2**20 * 128 if bench.on_gpu else 2**13  # bytes of a tensor
    for dtype in options.dtypes:
        bench.dtype = DTYPES[dtype]
        shapes = {"GPT-2": (12 * 1024 if bench.on_gpu else 12, 768)}
        shapes |= {f"N = {n}": (max(1, elements // bench.dtype.itemsize // n), n) for n in options.widths}
        for name, shape in shapes.items():
            contenders = {"triton": triton_layer_norm, "torch": torch_layer_norm}
            if not options.no_compile:
                contenders["compile"] = compile_apart(torch_layer_norm, repeatable=True, dynamic=False)
            entry = {"dtype": dtype, "case": name}
            try:
                if time.monotonic() - start > options.time_limit:
                    raise TimeoutError("left out by --time-limit")
                entry |= measure_case(bench, shape, contenders) | {"error": None}
                report(f"{dtype} {name}", entry, result["copy_rate"])
            except Exception as error:  # the other cases can still be measured
                entry["error"] = describe(error)
                all_right &= not isinstance(error, ArithmeticError)
                print(f"{dtype} {name}: {entry['error']}", flush=True)
            result["cases"].append(entry)
            file.save(result)
            release(device)
    print(f"\nResults: {file.path}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
