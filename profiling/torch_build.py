"""Print what PyTorch is built for: rocm 6.4, cuda 12.8 or cpu; an empty line if there is no PyTorch.

    python -m profiling.torch_build

Called by the profiling scripts. It does not import torch, which takes seconds. Exit codes: 0 done, with or without one.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

from profiling.command_line import Parser


def torch_build():
    """rocm 6.4 for a PyTorch of ROCm 6.4.43482, cuda and its release, cpu, or nothing if there is none."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).parent / "version.py" if found and found.origin else None
    if not file or not file.exists():
        return ""
    versions = runpy.run_path(str(file))
    for name, key in (("rocm", "hip"), ("cuda", "cuda")):
        if versions.get(key):
            return f"{name} {'.'.join(versions[key].split('.')[:2])}"
    return "cpu"


def main(argv=None):
    Parser("torch_build", __doc__).parse_args(argv)
    print(torch_build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
