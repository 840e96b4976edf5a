"""Print the ROCm release that PyTorch was built for, 6.4 for example; an empty line if it was built for none.

    python -m profiling.torch_rocm

Called by the profiling scripts. It does not import torch, which takes seconds. Exit codes: 0 done, with or without one.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

from profiling.command_line import Parser


def torch_rocm():
    """6.4 for a PyTorch of ROCm 6.4.43482, nothing for one of CUDA or for CPUs, or if there is none."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).parent / "version.py" if found and found.origin else None
    if not file or not file.exists():
        return ""
    hip = runpy.run_path(str(file)).get("hip") or ""
    return ".".join(hip.split(".")[:2])


def main(argv=None):
    Parser("torch_rocm", __doc__).parse_args(argv)
    print(torch_rocm())
    return 0


if __name__ == "__main__":
    sys.exit(main())
