"""What the prepare.py scripts share: their command line, downloads, and text to tokens."""

import urllib.request
from pathlib import Path

from measure.command_line import Parser, exit_code_of, replacing
from nanogpt_triton.dataset import Vocabulary, read_text, reading, write_dataset

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def run(script, description, prepare, inputs=True):
    """Call prepare(options) with the folder of the script as the default output. Return the exit code."""
    parser = Parser("prepare.py", description)
    folder = Path(script).resolve().parent
    if inputs:
        own = dict(nargs="+", type=Path, default=[], metavar="FILE", help="text of your own (UTF-8)")
        parser.add_argument("--input", **own)
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="default: the script's folder")
    return exit_code_of(lambda: prepare(parser.parse_args()), "prepare.py")


def shakespeare(options):
    """Return {split: text} of the files given with --input, or of Shakespeare's from the network."""
    path = options.output / "input.txt"
    if not (options.input or path.exists()):
        with replacing(path) as partial, reading(SHAKESPEARE_URL, "fetch it elsewhere and give --input FILE"):
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
                partial.write_bytes(response.read())  # an error if less arrives than was promised
    # The first nine tenths for training, the rest for validation.
    text = "".join(map(read_text, options.input or [path]))
    cut = len(text) * 9 // 10
    return {"train": text[:cut], "val": text[cut:]}


def write_texts(folder, texts, tokenizer=None):
    """Write {split: text} as a dataset, of characters if there is no tokenizer."""
    tokenizer = tokenizer or Vocabulary(sorted(set().union(*texts.values())))
    with write_dataset(folder, tokenizer) as add:
        for split, text in texts.items():
            add(split, tokenizer.encode(text))
