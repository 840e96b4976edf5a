"""The command line of the scripts that run without PyTorch; the others have tiny_llama_v3.Parser."""

import argparse


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line, where argparse prints the usage as well."""

    def __init__(self, prog, description):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def positive(text):
    """The type of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive: give 1 or more")
    return int(text)


positive.__name__ = "int"  # what argparse calls it
