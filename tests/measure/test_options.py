"""Options out of range are refused with the value and the remedy."""

import argparse

import pytest

from measure.options import positive, time_limit


@pytest.mark.parametrize("kind, text", [(positive, "0"), (time_limit, "-1"), (time_limit, "nan")])
def test_options_out_of_range(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not .*: give"):
        kind(text)


def test_options_in_range():
    assert positive("1") == 1 and time_limit("0") == 0.0
