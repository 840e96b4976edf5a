"""What runs on an emulated GPU alone."""

import os

import pytest

from offline.emulator import CHIPS

EMULATED = os.environ.get("EMULATE")  # the architecture, of `make emulate`
FAMILY = EMULATED and CHIPS[EMULATED].family
only_emulated = pytest.mark.skipif(EMULATED is None, reason="runs on an emulated AMD GPU: make emulate")
only_cdna = pytest.mark.skipif(FAMILY != "cdna", reason="instructions of CDNA: make emulate ARCH=gfx942")
only_rdna = pytest.mark.skipif(FAMILY != "rdna", reason="instructions of RDNA: make emulate ARCH=gfx1201")
needs_fp8 = pytest.mark.skipif(EMULATED in ("gfx90a", "gfx1100"), reason=f"{EMULATED} has no FP8")
