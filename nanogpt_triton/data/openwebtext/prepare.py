#!/usr/bin/env python3
"""OpenWebText from Hugging Face (54 GB of downloads, 18 GB written), or text files of your own, as GPT-2's byte pairs.

Needs tiktoken, and without --input the library datasets. Each file is a document. The first of each 2000 documents goes
to validation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanogpt_triton.data.preparing import run  # noqa: E402
from nanogpt_triton.dataset import BytePairs, library, read_text, reading, write_dataset  # noqa: E402

REPOSITORY = "Skylion007/openwebtext"  # Parquet files: datasets refuses scripts since its version 4


def openwebtext():
    """Yield the documents."""
    datasets = library("datasets", "OpenWebText, without --input FILE ...,")
    with reading(REPOSITORY, "give --input FILE ... instead"):
        rows = datasets.load_dataset(REPOSITORY, split="train")
    for row in rows:
        yield row["text"]


def prepare(options):
    tokenizer = BytePairs()
    documents = map(read_text, options.input) if options.input else openwebtext()
    with write_dataset(options.output, tokenizer) as add:
        for number, tokens in enumerate(tokenizer.encode_documents(documents)):
            add("train" if number % 2000 else "val", tokens)


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare))
