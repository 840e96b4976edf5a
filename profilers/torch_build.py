"""Print the platform that PyTorch is built for: rocm 6.4, cuda 12.8 or cpu; without PyTorch an empty line.

    python -m profilers.torch_build

The profiling scripts call it. It does not import torch, which takes seconds. The exit code is 0 in all cases.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m profilers.torch_build", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program


def torch_build():
    """Returns "rocm 6.4" for a PyTorch of ROCm 6.4.43482, "cuda" and its release, "cpu", or "" without PyTorch.

    HIP has releases of its own, such as 7.15 for ROCm 10.0; then PyTorch tells ROCm's as well.
    """
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).parent / "version.py" if found and found.origin else None
    if not file or not file.exists():
        return ""
    versions = runpy.run_path(str(file))
    for name, release in (("rocm", versions.get("rocm") or versions.get("hip")), ("cuda", versions.get("cuda"))):
        if release:
            return f"{name} {'.'.join(release.split('.')[:2])}"
    return "cpu"


@program("torch_build")
def main(argv):
    Parser("torch_build", __doc__).parse_args(argv)
    print(torch_build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
