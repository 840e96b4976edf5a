"""Time nanogpt_triton's LayerNorm against F.layer_norm, eager and compiled, over widths 256 to 16384.

    python -m benchmarks.layer_norm                       fp32 and bf16, all widths
    python -m benchmarks.layer_norm --dtypes bf16 --widths 768 4096

The first case of a type is GPT-2's, 12 x 1024 x 768; the others have tensors of 128 MiB. "us" is device time: calls
captured in one graph, the median replay. "wall us" is what a loop of calls takes with the host's part. Bandwidth is
that of the bytes that must be moved at least: forward x and y, backward y_grad, x and x_grad. Results are compared with
float64 before anything is timed.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met, 130 interrupted.
"""

import argparse
import functools
import gc
import sys
import time

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from benchmarks.kernels import Bench, copy_cases, gradient_call, measure
from measure.results import RESULTS, ResultFile, describe, header, time_limit
from nanogpt_triton.kernels import triton_layer_norm
from tiny_llama_v3 import exit_code_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = (256, 512, 768, 1024, 2048, 4096, 8192, 16384)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}  # beyond twice PyTorch's own error
WALL_CALLS = 100
ROTATION = 2**28  # bytes that calls go round, far beyond the L2 cache


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def forward_and_backward(function, x, weight, bias, y_grad):
    # Fresh leaves: autograd ties a leaf to the stream that it was first used on, and a captured one must be its own.
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(function(*inputs), inputs, y_grad)


def relative_errors(function, inputs, y_grad, exact):
    """Distance of y and of each gradient from float64, relative to its norm."""
    results = function(*inputs), *forward_and_backward(function, *inputs, y_grad)
    return [
        float(torch.linalg.vector_norm(a.double() - e) / torch.linalg.vector_norm(e))
        for a, e in zip(results, exact, strict=True)
    ]


def check(inputs, y_grad):
    """Our error, at most twice PyTorch's in the same type plus a little; otherwise ArithmeticError."""
    rows = min(len(inputs[0]), 4096)
    inputs, y_grad = (inputs[0][:rows], *inputs[1:]), y_grad[:rows]
    doubles = [t.double() for t in (*inputs, y_grad)]
    exact = torch_layer_norm(*doubles[:3]), *forward_and_backward(torch_layer_norm, *doubles)
    ours = relative_errors(triton_layer_norm, inputs, y_grad, exact)
    plain = relative_errors(torch_layer_norm, inputs, y_grad, exact)
    for name, mine, theirs in zip(("y", "x_grad", "weight_grad", "bias_grad"), ours, plain, strict=True):
        if not mine <= 2 * theirs + TOLERANCE[y_grad.dtype]:
            raise ArithmeticError(f"{name} is {mine:.1e} from float64, and PyTorch's {theirs:.1e}")
    return max(ours)


def wall_microseconds(bench, calls):
    """Time of a call in a loop, host and device together."""

    def seconds(number):
        if bench.on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(number):
            calls[index % len(calls)]()
        if bench.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    number = WALL_CALLS if bench.on_gpu else 1
    seconds(number)
    return seconds(number) / number * 1e6


def measure_case(bench, shape, contenders):
    """{"shape", "worst_error", passes: {pass: {contender: {"us", "rate", "wall_us", "error"}}}}"""
    width = shape[-1]
    size = shape[0] * width * bench.dtype.itemsize
    number = min(8, max(2, -(-ROTATION // (3 * size)))) if bench.on_gpu else 1
    weight, bias = bench.randn(width, dtype=torch.float32), bench.randn(width, dtype=torch.float32)
    if bench.dtype == torch.float16 or bench.dtype == torch.bfloat16:
        weight, bias = weight.to(bench.dtype), bias.to(bench.dtype)  # F.layer_norm takes one type
    sets = [((bench.randn(*shape), weight, bias), bench.randn(*shape)) for _ in range(number)]
    case = {"shape": list(shape), "bytes": size, "worst_error": check(*sets[0]), "passes": {}}
    for name, function in contenders.items():
        forward = [functools.partial(function, *inputs) for inputs, _ in sets]
        both = [functools.partial(forward_and_backward, function, *inputs, y_grad) for inputs, y_grad in sets]
        passes = {"forward": (forward, 2 * size), "forward + backward": (both, 5 * size)}
        try:
            with bench.on_stream():
                leaves = [[t.detach().requires_grad_() for t in inputs] for inputs, _ in sets]
                backward = [gradient_call(function, x, y_grad) for x, (_, y_grad) in zip(leaves, sets, strict=True)]
            passes["backward"] = backward, 3 * size
        except Exception as error:  # of this contender alone
            passes["backward"] = error, 0
        for pass_name, (calls, amount) in passes.items():
            measured = measure(bench, calls, amount)
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
    parser = llama.Parser(
        prog="layer_norm.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), metavar="N")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled F.layer_norm out")
    parser.add_argument(
        "--time-limit", type=time_limit, default=480, metavar="S", help="start no case later (default: 480)"
    )
    parser.add_argument("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    if min(options.widths) < 1:
        raise llama.UsageError(f"--widths {min(options.widths)} is not positive: give 1 or more")
    return options


def run(argv):
    start = time.monotonic()
    options = parse(argv)
    device = llama.select_device("auto")
    obstacle = llama.triton_obstacle(device)
    if obstacle:
        raise llama.UsageError(f"the kernels need a GPU: {obstacle}")
    folder = llama.writable_folder("--output-dir", options.output_dir)
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # a backward pass is repeated on the same saved tensors
    torch.manual_seed(0)
    bench = Bench(device, compile_baselines=False)
    result = header("layer_norm", device, argv) | {"copy_rate": None, "cases": []}
    file = ResultFile(folder, result)
    print(f"{device.name} ({device.arch}), PyTorch {torch.__version__}", flush=True)
    if bench.on_gpu:
        for _, amount, _, calls in copy_cases(bench):
            result["copy_rate"] = measure(bench, calls["torch"], amount)["rate"]
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
                contenders["compile"] = torch.compile(torch_layer_norm, dynamic=False)
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
            gc.collect()
            torch.compiler.reset()
            if bench.on_gpu:
                torch.cuda.empty_cache()
    print(f"\nResults: {file.path}")
    return 0 if all_right else 1


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "layer_norm.py")


if __name__ == "__main__":
    sys.exit(main())
