"""What the prepare.py scripts share: their command line, downloads, and text to tokens."""

import shutil
import signal
import urllib.request
from pathlib import Path

from measure.command_line import Parser, program, replacing
from nanogpt_triton.dataset import TOKEN, Characters, Writer
from tiny_llama_v3 import UsageError

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def run(script, description, prepare, argv=None, inputs=True):
    """Runs prepare(options) with the folder of the script as default output. Returns the exit code."""

    is_program = argv is None

    @program("prepare.py")
    def main(argv):
        parser = Parser("prepare.py", description)
        if inputs:
            own = dict(nargs="+", type=Path, default=[], metavar="FILE", help="text of your own (UTF-8)")
            parser.add_argument("--input", **own)
        folder = Path(script).resolve().parent
        parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="default: the script's folder")
        options = parser.parse_args(argv)
        if is_program:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that temporary files are removed
        try:
            prepare(options)
        except OSError as error:
            raise UsageError(f"{error.filename or options.output}: {error.strerror or error}") from error
        return 0

    return main(argv)


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--input {path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--input {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def download(url, path, timeout=30):
    """Fetches url into path, whole or not at all."""
    with replacing(path) as partial:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response, open(partial, "wb") as file:
                shutil.copyfileobj(response, file)
                expected = response.headers.get("Content-Length")
            if expected and partial.stat().st_size != int(expected):
                raise OSError(f"{partial.stat().st_size} of {expected} bytes arrived")
        except OSError as error:  # URLError and time-outs are
            reason = getattr(error, "reason", None) or error
            raise UsageError(f"cannot download {url} ({reason}): fetch it elsewhere and give --input FILE") from error


def shakespeare(options):
    """The text given with --input, or Shakespeare's from the network."""
    if options.input:
        return "".join(read_text(path) for path in options.input)
    path = options.output / "input.txt"
    if not path.exists():
        download(SHAKESPEARE_URL, path)
    return read_text(path)


def split_text(text):
    """The first nine tenths for training, the rest for validation."""
    cut = len(text) * 9 // 10
    return {"train": text[:cut], "val": text[cut:]}


def write_characters(folder, texts, **about):
    """{split: text} as a dataset of characters."""
    tokenizer = Characters("".join(sorted(set().union(*texts.values()))))
    if tokenizer.vocab_size > 256**TOKEN.itemsize:
        raise UsageError(f"the text has {tokenizer.vocab_size} characters, more than {TOKEN} can number: give less")
    with Writer(folder) as writer:
        for split, text in texts.items():
            writer.add(split, tokenizer.encode(text))
        writer.finish(tokenizer, **about)
