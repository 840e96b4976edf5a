"""Run tritonbench's operators rms_norm, layer_norm and swiglu with a row, tiny_llama, for our kernels.

    git clone https://github.com/meta-pytorch/tritonbench ../tritonbench
    PYTHONPATH=../tritonbench python -m examples.tritonbench_rows --op rms_norm --metrics latency,speedup,accuracy
    PYTHONPATH=../tritonbench python -m examples.tritonbench_rows --op rms_norm --metrics latency,speedup --bwd

The options are tritonbench's (commit db2155c was tried); its operators need transformers and liger-kernel. With --bwd
its accuracy means nothing, because each row gets another gradient. It repeats calls on the same tensors, so swiglu,
whose backward pass overwrites what it reads, runs only forward, and our cross-entropy, which overwrites the logits, not
at all.
"""

import sys
from functools import partial

import torch

if not __package__:
    print("run it from the root as python -m examples.tritonbench_rows", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.command_line import UsageError, program
from nanogpt_triton.kernels import triton_layer_norm


def swiglu(operator, x):
    mlp = operator.baseline_op
    # Our kernel multiplies once with both weights, one below the other.
    gate_up_weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    return partial(llama.triton_swiglu, x, gate_up_weight, mlp.down_proj.weight)


ROWS = {  # what tritonbench calls with an operator and its inputs, to get what it times
    "rms_norm": lambda operator, size, x: partial(llama.TritonRMSNorm(size, operator.eps).to(x.device, x.dtype), x),
    "layer_norm": lambda operator, x, shape, weight, bias, eps: partial(triton_layer_norm, x, weight, bias, eps),
    "swiglu": swiglu,
}


@program("tritonbench_rows")
def main(argv):
    try:
        import run
        from tritonbench.operators import load_opbench_by_name
        from tritonbench.utils.triton_op import register_benchmark

        for name, row in ROWS.items():
            register = register_benchmark(name, "tiny_llama", fwd_only=row is swiglu)
            load_opbench_by_name(name).tiny_llama = register(row)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: PYTHONPATH must name a clone of tritonbench") from error
    run.run(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
