"""Time the SwiGLU kernels of tiny_llama_v3.py over their block sizes, beside the library's product.

    python -m exercises.sweep_swiglu

Every result is compared with one in higher precision before it is timed. Times are medians of the device's clock, the
cache flushed before each call. Without a GPU a small size is interpreted: results are checked, times are left out.
Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met.
"""

import os
import sys
from functools import partial

import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import tiny_llama_v3 as llama  # noqa: E402
from measure import work  # noqa: E402
from measure.accuracy import KERNEL_TOLERANCE, compare, promoted  # noqa: E402
from tiny_llama_v3 import exit_code_of  # noqa: E402

NAIVE_BLOCKS = (32, 64, 128, 256, 512)
ACTIVATION_BLOCKS = (128, 256, 512, 1024, 2048, 4096)


def report(label, call, result, plain, exact, amount, unit):
    """Prints a line; False if the result, which call must have filled, is wrong. amount: FLOP or bytes of a call."""
    call()
    verdict = compare({"": result}, {"": plain}, {"": exact}, KERNEL_TOLERANCE[result.dtype])
    if verdict.failed:
        print(f"{label:34} WRONG: relative error {verdict.errors['']:.1e}, allowed {verdict.allowed['']:.1e}")
        return False
    if ON_GPU:
        ms = llama.triton.testing.do_bench(call, return_mode="median")
        print(f"{label:34} {ms * 1e3:10.1f} us {amount / ms / 1e9:10.3g} {unit}", flush=True)
    else:
        print(f"{label:34} right (interpreted: not timed)", flush=True)
    return True


def activation(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sweep():
    """Yields whether each result is right."""
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
        yield report(f"swiglu_kernel, BLOCK_SIZE {block}", call, hidden, activated, exact, flop, "TFLOP/s")
    library = partial(torch.mm, x, weight.t(), out=gate_up)
    yield report("the library's product", library, gate_up, product, exact_product, flop, "TFLOP/s")
    for block in ACTIVATION_BLOCKS:
        kernel = llama.swiglu_activation_kernel[(rows * llama.cdiv(cols, block),)]
        call = partial(kernel, gate_up, hidden, cols, BLOCK_SIZE=block)
        yield report(f"activation, BLOCK_SIZE {block}", call, hidden, activated, exact, moved, "TB/s")


def run(argv):
    llama.Parser("sweep_swiglu.py", __doc__).parse_args(argv)
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton (on Linux)")
    torch.manual_seed(0)
    return int(not all(list(sweep())))


def main(argv=None):
    return exit_code_of(lambda: run(argv), "sweep_swiglu.py")


if __name__ == "__main__":
    sys.exit(main())
