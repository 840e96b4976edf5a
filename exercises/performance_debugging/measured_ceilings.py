"""Measure the bandwidth and the arithmetic that this device reaches.

    python -m exercises.performance_debugging.measured_ceilings --use-amp --output-dir DIR    writes DIR/ceilings.json

The options are those of tiny_llama_v3.py.
"""

import sys

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.measured_ceilings", file=sys.stderr)
    sys.exit(2)
import torch
from torch.utils.benchmark import Timer

import tiny_llama_v3 as llama
from exercises.performance_debugging.measured import program_of
from tiny_llama import hardware


def measure(config, device):
    """Returns what a copying kernel and the library's matmul reach in this precision, and the datasheet's peak."""
    on_gpu = device.type == "cuda"
    x = torch.ones(2**28 if on_gpu else 2**24, device=device.type)  # more than any cache holds
    dtype = torch.bfloat16 if config.use_amp else torch.float32
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, device=device.type).to(dtype)

    def seconds(statement, **names):
        timer = Timer(statement, globals={"torch": torch} | names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    ceilings = {
        "bytes_per_second": 2 * x.nbytes / seconds("torch.neg(x, out=y)", x=x, y=torch.empty_like(x)),
        "flop_per_second": 2 * side**3 / seconds("torch.mm(a, b, out=c)", a=a, b=a.clone(), c=torch.empty_like(a)),
        "peak_tflops": hardware.peak_tflops(device, llama.precision_name(config, device)),
    }
    bandwidth, arithmetic = (ceilings[name] / 1e12 for name in ("bytes_per_second", "flop_per_second"))
    print(f"{device.name}: {bandwidth:.3g} TB/s, {arithmetic:.3g} TFLOP/s")
    return ceilings


main = program_of("ceilings", measure, needs_gpu=False)

if __name__ == "__main__":
    sys.exit(main())
