#!/usr/bin/env python3
"""Shakespeare's works, or a text of your own, as GPT-2's byte pairs (needs tiktoken)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanogpt_triton.data.preparing import run, shakespeare, write_texts  # noqa: E402  (the repository is on the path)
from nanogpt_triton.dataset import BytePairs  # noqa: E402


def prepare(options):
    tokenizer = BytePairs()  # before the download, which is of no use without it
    write_texts(options.output, shakespeare(options), tokenizer)


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare))
