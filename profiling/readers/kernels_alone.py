"""The JSON of run_triton_profiling.py: each Triton kernel alone, under the ceilings that were measured beside it."""

import json

from profiling.readers.files import Unreadable, reported


def read_kernels_alone(path):
    """The file as a dict; raises Unreadable if it is another.

    ceilings {"GB/s", "TFLOP/s"}; kernels, a list of dicts with name, bytes and flop that the kernel must do at least,
    and triton {"ms"}; environment {"device", "arch", "torch", "triton"}; date.
    """
    with reported(path):
        result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"ceilings", "kernels", "environment"} <= result.keys():
        raise Unreadable(f"{path} is no result of run_triton_profiling.py --json")
    return result
