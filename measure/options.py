"""Types of options that several programs have. Needs nothing but Python."""

import argparse


def positive(text):
    """A whole number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive: give 1 or more")
    return int(text)


positive.__name__ = "int"  # what argparse calls it


def time_limit(text):
    """Seconds, 0 or more."""
    if not float(text) >= 0:  # NaN is none either
        raise argparse.ArgumentTypeError(f"{text} is not a time: give a number of seconds")
    return float(text)
