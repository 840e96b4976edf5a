"""The two roofs of this device, measured, and the work of each of our kernels.

    python -m exercises.performance_debugging.ceilings --use-amp --output-dir DIR      writes DIR/roofs.json

The options are those of tiny_llama_v3.py.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

import tiny_llama_v3 as llama
from tiny_llama_v3 import exit_code_of


class Work(NamedTuple):
    bytes: float  # that one call must move at least
    flop: float


def kernel_work(config):
    """{kernel: Work} of one call in a step of this llama.Config; the average, where calls differ."""
    tokens, hidden, ffn, vocab = config.tokens_per_step, config.hidden_dim, config.ffn_dim, config.vocab_size
    size = 2 if config.use_amp else 4
    q_width, kv_width = hidden, config.num_kv_heads * config.head_dim
    norms = 2 * config.num_layers + 1  # the first has nothing to add, the last receives no gradient of its residual
    product = tokens * config.seq_len * hidden  # FLOP of q k^T and of its like, half of it masked
    row_statistics = 4 * tokens * config.num_heads
    layer = hidden * (2 * q_width + 2 * kv_width + 3 * ffn) + 2 * hidden
    parameters = config.num_layers * layer + (vocab + 1) * hidden

    def attention(q_sized, kv_sized, products):
        return Work(tokens * size * (q_sized * q_width + kv_sized * kv_width) + row_statistics, products * product)

    return {
        "rmsnorm_kernel": Work(tokens * hidden * size * (4 - 2 / norms), 5 * tokens * hidden),
        "rmsnorm_backward_kernel": Work(tokens * hidden * size * (4 - 1 / norms), 10 * tokens * hidden),
        "rope_kernel": Work(2 * tokens * (q_width + kv_width) * size, 3 * tokens * (q_width + kv_width)),
        "flash_attention_kernel": attention(2, 2, 2),
        "flash_attention_backward_kernel": attention(4, 4, 5),
        "flash_attention_backward_dq_kernel": attention(4, 2, 3),
        "flash_attention_backward_dkdv_kernel": attention(2, 4, 4),
        "swiglu_activation_kernel": Work(3 * tokens * ffn * size, 5 * tokens * ffn),
        "swiglu_activation_backward_kernel": Work(5 * tokens * ffn * size, 9 * tokens * ffn),
        "swiglu_kernel": Work(
            (tokens * hidden + 2 * ffn * hidden + 3 * tokens * ffn) * size, 4 * tokens * ffn * hidden
        ),
        "cross_entropy_kernel": Work(2 * tokens * vocab * size, 6 * tokens * vocab),
        "embedding_backward_kernel": Work((tokens + 2 * vocab) * hidden * size, tokens * hidden),
        "adamw_kernel": Work((26 if config.use_amp else 28) * parameters, 14 * parameters),
    }


def measure_roofs(config, device):
    """What a copying kernel and the library's matmul in this precision reach, and the datasheet's arithmetic in it."""
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision(config.matmul_precision)
    x = torch.ones(2**28 if on_gpu else 2**24, device=device.type)  # more than any cache holds
    dtype = torch.bfloat16 if config.use_amp else torch.float32
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, device=device.type).to(dtype)

    def seconds(statement, **names):
        timer = Timer(statement, globals={"torch": torch} | names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    return {
        "bytes_per_second": 2 * x.nbytes / seconds("torch.neg(x, out=y)", x=x, y=torch.empty_like(x)),
        "flop_per_second": 2 * side**3 / seconds("torch.mm(a, b, out=c)", a=a, b=a.clone(), c=torch.empty_like(a)),
        "peak_tflops": llama.peak_tflops(device, llama.precision_name(config, device)),
    }


def run(argv):
    config = llama.parse_config(sys.argv[1:] if argv is None else argv, "ceilings.py")
    device = llama.select_device(config.device)
    roofs = measure_roofs(config, device)
    llama.write_json(Path(config.output_dir, "roofs.json"), roofs)
    print(f"{device.name}: {roofs['bytes_per_second'] / 1e12:.3g} TB/s, {roofs['flop_per_second'] / 1e12:.3g} TFLOP/s")
    return 0


def main(argv=None):
    return exit_code_of(lambda: run(argv), "ceilings.py")


if __name__ == "__main__":
    sys.exit(main())
