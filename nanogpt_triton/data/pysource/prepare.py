#!/usr/bin/env python3
"""The source of Python's standard library on this machine, a token a character. Needs no network.

Every tenth file is for validation. Characters beyond ASCII and the library's own tests are left out.
"""

import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanogpt_triton.data.preparing import run, write_texts  # noqa: E402

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def prepare(options):
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(library).parts)]
    texts = [path.read_text(encoding="ascii", errors="ignore") for path in sorted(files)]
    held_out = texts[::10]
    del texts[::10]
    write_texts(options.output, {"train": "\n".join(texts), "val": "\n".join(held_out)})


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare, inputs=False))
