"""Measure the bandwidth and the arithmetic that a device reaches."""

import torch
from torch.utils.benchmark import Timer


def ceilings(config, device):
    """Return what a copying kernel and the library's matmul reach in the precision of a llama.Config."""
    on_gpu = device.type == "cuda"
    # More bytes than any cache holds, and a product that is large enough for all multiprocessors.
    x = torch.ones(2**28 if on_gpu else 2**24, device=device.type)
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, device=device.type).to(torch.bfloat16 if config.use_amp else torch.float32)

    def seconds(statement, **names):
        # Timer would use one thread.
        timer = Timer(
            statement,
            globals={"torch": torch} | names,
            num_threads=torch.get_num_threads(),
        )
        return timer.blocked_autorange(min_run_time=0.2).median

    bandwidth = 2 * x.nbytes / seconds("torch.neg(x, out=y)", x=x, y=torch.empty_like(x))
    arithmetic = 2 * side**3 / seconds("torch.mm(a, b, out=c)", a=a, b=a.clone(), c=torch.empty_like(a))
    return {
        "bytes_per_second": bandwidth,
        "flop_per_second": arithmetic,
    }
