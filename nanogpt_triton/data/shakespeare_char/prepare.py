#!/usr/bin/env python3
"""Shakespeare's works, or a text of your own, a token a character."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanogpt_triton.data.preparing import run, shakespeare, write_texts  # noqa: E402


def prepare(options):
    write_texts(options.output, shakespeare(options))


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare))
