"""What runs on an emulated GPU alone."""

import os

import pytest

EMULATED = os.environ.get("EMULATE")  # the architecture, of `make emulate`
only_emulated = pytest.mark.skipif(EMULATED is None, reason="runs on an emulated AMD GPU: make emulate")
needs_fp8 = pytest.mark.skipif(EMULATED == "gfx90a", reason="gfx90a has no FP8")
