"""Reads the JSON of run_triton_profiling.py: each Triton kernel by itself, and the measured ceilings."""

import json

import pandas as pd

from profilers.readers.files import Unreadable, reported


def read_kernel_benchmark(path):
    """Read the file as a dict; raise Unreadable for other files.

    ceilings {"GB/s", "TFLOP/s"}; kernels, a list of dicts with name, the least bytes and flop of the kernel, and
    triton {"ms"}; environment {"device", "arch", "torch", "triton"}; date.
    """
    with reported(path):
        result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"ceilings", "kernels", "environment"} <= result.keys():
        raise Unreadable(f"{path} is no result of run_triton_profiling.py --json")
    return result


def kernels_alone(result):
    """Return the kernels of a result that have them as a table with the columns kernel, bytes, flop and ns."""
    rows = [(k["name"], k["bytes"], k["flop"], 1e6 * k["triton"]["ms"]) for k in result["kernels"]]
    return pd.DataFrame(rows, columns=["kernel", "bytes", "flop", "ns"])


def rates(kernels, ceilings):
    """Return what follows from a table of kernel, bytes, flop and ns, beside the ceilings of a result."""
    # Bytes a ns are GB/s, and FLOP a ns GFLOP/s. Below the ridge, arithmetic / bandwidth, memory limits a kernel.
    bandwidth, arithmetic = ceilings["GB/s"] / 1e3, ceilings["TFLOP/s"]
    moved, computed = kernels["bytes"] / kernels["ns"], kernels["flop"] / kernels["ns"] / 1e3
    intensity = kernels["flop"] / kernels["bytes"]
    return pd.DataFrame(
        {
            "kernel": kernels["kernel"],
            "MB": kernels["bytes"] / 1e6,
            "ms": kernels["ns"] / 1e6,
            "GB/s": moved,
            "% of the bandwidth": moved / bandwidth / 10,
            "FLOP a byte": intensity,
            "TFLOP/s": computed,
            "ceiling": intensity.lt(arithmetic / bandwidth).map({True: "memory", False: "arithmetic"}),
            "% of the ceiling": 100 * computed / (intensity * bandwidth).clip(upper=arithmetic),
        }
    )
