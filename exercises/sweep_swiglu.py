"""Time the SwiGLU kernels of tiny_llama_v3.py over their block sizes, and the library's product.

    python -m exercises.sweep_swiglu
    python -m exercises.sweep_swiglu --output sweep.json    keep the rows for exercises.scoreboard

Every result is compared with one in higher precision before it is timed. Times are medians by the device's clock, with
the cache flushed before each call. Without a GPU small sizes are interpreted: results are checked but not timed.
Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met.
"""

import os
import sys
from functools import partial
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.sweep_swiglu", file=sys.stderr)
    sys.exit(2)
import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import tiny_llama_v3 as llama  # noqa: E402
from exercises.progress_file import now, participant_name, user_name  # noqa: E402
from measure import work  # noqa: E402
from measure.accuracy import KERNEL_TOLERANCE, compare, promoted  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import require_triton  # noqa: E402
from measure.results import write_json  # noqa: E402

NAIVE_BLOCKS = (32, 64, 128, 256, 512)
ACTIVATION_BLOCKS = (128, 256, 512, 1024, 2048, 4096)


def report(kernel, block_size, call, result, plain, exact, amount, unit):
    """Prints a line and returns it as a row: kernel, block_size (None: the library's), right, us (None: not timed).

    call must fill result; amount: FLOP or bytes of a call.
    """
    label = f"{kernel}, BLOCK_SIZE {block_size}" if block_size else kernel
    row = {"kernel": kernel, "block_size": block_size, "right": True, "us": None}
    call()
    verdict = compare({"": result}, {"": plain}, {"": exact}, KERNEL_TOLERANCE[result.dtype])
    if verdict.failed:
        print(f"{label:34} WRONG: relative error {verdict.errors['']:.1e}, allowed {verdict.allowed['']:.1e}")
        return row | {"right": False}
    if ON_GPU:
        ms = llama.triton.testing.do_bench(call, return_mode="median")
        print(f"{label:34} {ms * 1e3:10.1f} us {amount / ms / 1e9:10.3g} {unit}", flush=True)
        return row | {"us": ms * 1e3}
    print(f"{label:34} right (interpreted: not timed)", flush=True)
    return row


def activation(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sweep():
    """Yields the row of report() for each kernel and block size."""
    rows, inner, cols = (1024, 512, 2048) if ON_GPU else (2, 32, 48)
    # The interpreter multiplies bf16 matrices wrongly.
    randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16) if ON_GPU else torch.randn
    x, weight = randn(rows, inner), randn(2 * cols, inner) * inner**-0.5
    gate_up, hidden = randn(rows, 2 * cols), randn(rows, cols)
    product, exact_product = F.linear(x, weight), F.linear(*promoted((x, weight)))
    activated, exact = activation(product), activation(exact_product)
    flop, moved = work.swiglu_matmul(x, weight, gate_up, hidden).flop, work.swiglu_activation(gate_up, hidden).bytes
    print(f"x ({rows}, {inner}), weight ({2 * cols}, {inner}), {x.dtype}")
    for block in NAIVE_BLOCKS:
        kernel = llama.swiglu_kernel[(rows * cols,)]
        call = partial(kernel, x, weight, gate_up, hidden, inner, cols, BLOCK_SIZE=block)
        yield report("swiglu_kernel", block, call, hidden, activated, exact, flop, "TFLOP/s")
    library = partial(torch.mm, x, weight.t(), out=gate_up)
    yield report("the library's product", None, library, gate_up, product, exact_product, flop, "TFLOP/s")
    for block in ACTIVATION_BLOCKS:
        kernel = llama.swiglu_activation_kernel[(rows * llama.cdiv(cols, block),)]
        call = partial(kernel, gate_up, hidden, cols, BLOCK_SIZE=block)
        yield report("activation", block, call, hidden, activated, exact, moved, "TB/s")


@program("sweep_swiglu.py")
def main(argv):
    parser = Parser("sweep_swiglu.py", __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--name", type=participant_name, default=user_name(), help="participant (default: the user's)")
    options = parser.parse_args(argv)
    require_triton()
    torch.manual_seed(0)
    rows = list(sweep())
    if options.output:
        device = llama.select_device("auto")
        result = {"participant": options.name, "date": now()}
        write_json(options.output, result | {"device": device.name, "rows": rows})
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
