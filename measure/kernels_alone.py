"""Reads the JSON of run_triton_profiling.py: each Triton kernel by itself, and the measured ceilings. No PyTorch."""

import json
import math

import pandas as pd

from measure.command_line import UsageError, printable_fields


def read_kernels_alone(path):
    """Read the file as a dict; raise UsageError, or what a parser raises, for other files.

    ceilings {"GB/s", "TFLOP/s"}; kernels, a list of dicts with name, the least bytes and flop of the kernel, and
    triton {"ms"}; environment {"device", "arch", "torch", "triton"}; date.
    """
    result = json.loads(path.read_text(), object_hook=printable_fields)
    if not {"ceilings", "kernels", "environment"} <= set(result):
        raise UsageError(f"{path} is no result of run_triton_profiling.py --json")
    return result


def rates_alone(result):
    """Return the rates() of the kernels of a result that has them; ValueError if a figure cannot be."""
    rows = [(k["name"], k["bytes"], k["flop"], 1e6 * k["triton"]["ms"]) for k in result["kernels"]]
    table = rates(pd.DataFrame(rows, columns=["kernel", "bytes", "flop", "ns"]), result["ceilings"])
    figures = table.drop(columns=["kernel", "ceiling"])
    # While caches take what a kernel writes, it may be above the ceiling, but not far above.
    are_good = (figures.gt(0) & figures.lt(math.inf)).all(axis="columns") & (table["% of the ceiling"] < 300)
    if not are_good.all():
        kernel, *_, share = table[~are_good].iloc[0]
        raise ValueError(f"{kernel} is at {share:.0f} % of its ceiling: its work is counted wrong, or its time is")
    return table


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
