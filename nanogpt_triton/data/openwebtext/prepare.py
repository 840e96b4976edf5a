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
from nanogpt_triton.dataset import BytePairs, Writer  # noqa: E402
from tiny_llama_v3 import UsageError  # noqa: E402

REPOSITORY = "Skylion007/openwebtext"  # Parquet files: datasets refuses scripts since its version 4
SEED = 2357
DOCUMENTS_AT_ONCE = 1000


def openwebtext():
    try:
        from datasets import load_dataset
        from tqdm import tqdm  # which datasets needs as well
    except ImportError:
        raise UsageError("OpenWebText needs a library: pip install datasets, or give --input FILE ...") from None
    try:
        dataset = load_dataset(REPOSITORY, split="train")
    except Exception as error:  # whatever its download raises
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot download OpenWebText ({reason:.300}): give --input FILE ... instead") from error
    return (document["text"] for document in tqdm(dataset, unit=" documents"))


def prepare(options):
    tokenizer = BytePairs()
    documents = (read_text(path) for path in options.input) if options.input else openwebtext()
    generator = np.random.default_rng(SEED)
    held_back = None  # the last document, for validation
    with Writer(options.output) as writer:
        while texts := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for tokens in tokenizer.encode_documents(texts):
                if held_back is not None:
                    writer.add("val" if generator.random() < 1 / 2000 else "train", held_back)
                held_back = tokens
        writer.add("val", held_back or [])
        writer.finish(tokenizer)


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, prepare))
