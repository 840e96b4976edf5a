#!/usr/bin/env python3
"""OpenWebText from Hugging Face (54 GB of downloads, 18 GB written), or text files of your own, as GPT-2's byte pairs.

Needs tiktoken, and without --input the library datasets. Each file is a document. One document in 2000, drawn with a
fixed seed, goes to validation, and the last one in any case.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from nanogpt_triton.data.preparing import read_text, run  # noqa: E402
from nanogpt_triton.dataset import BytePairs, library, reading, write_dataset  # noqa: E402

REPOSITORY = "Skylion007/openwebtext"  # Parquet files: datasets refuses scripts since its version 4
SEED = 2357
DOCUMENTS_AT_ONCE = 1000


def openwebtext():
    """Yield the documents."""
    datasets = library("datasets", "OpenWebText, without --input FILE ...,")
    with reading(REPOSITORY, "give --input FILE ... instead"):
        rows = datasets.load_dataset(REPOSITORY, split="train")
    for row in rows:
        yield row["text"]


def prepare(options):
    tokenizer, generator = BytePairs(), np.random.default_rng(SEED)
    documents = map(read_text, options.input) if options.input else openwebtext()
    held_back = []  # the last document, for validation
    with write_dataset(options.output, tokenizer) as add:
        while texts := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for tokens in tokenizer.encode_documents(texts):
                # A document is drawn for validation once another one follows it.
                if held_back:
                    add("val" if generator.random() < 1 / 2000 else "train", held_back)
                held_back = tokens
        add("val", held_back)


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare))
