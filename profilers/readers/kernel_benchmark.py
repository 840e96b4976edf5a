"""Reads the JSON of run_triton_profiling.py: each Triton kernel by itself, and the measured ceilings."""

import json

from profilers.readers.files import Unreadable, reported


def read_kernel_benchmark(path):
    """Reads the file as a dict; raises Unreadable for other files.

    ceilings {"GB/s", "TFLOP/s"}; kernels, a list of dicts with name, the least bytes and flop of the kernel, and
    triton {"ms"}; environment {"device", "arch", "torch", "triton"}; date.
    """
    with reported(path):
        result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"ceilings", "kernels", "environment"} <= result.keys():
        raise Unreadable(f"{path} is no result of run_triton_profiling.py --json")
    return result
