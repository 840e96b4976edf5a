"""What the emulator accepts of a kernel that the installed Triton, or an older one, compiles."""

from types import SimpleNamespace

import pytest

from tests.offline.selection import EMULATED, only_emulated

if EMULATED:
    from offline.emulator.driver import Launcher

pytestmark = only_emulated


@pytest.mark.parametrize("sizes, accepted", [
    (dict(profile_scratch_size=0), True),  # of Triton 3.6 and 3.7
    (dict(profile_scratch_size=0, global_scratch_size=0), True), (dict(profile_scratch_size=8), False),
    (dict(profile_scratch_size=0, global_scratch_size=8), False),
])  # fmt: skip
def test_scratch_memory_is_refused(sizes, accepted):
    source, metadata = SimpleNamespace(signature={}), SimpleNamespace(name="a", **sizes)
    if accepted:
        assert Launcher(source, metadata).metadata is metadata
    else:
        with pytest.raises(NotImplementedError, match="a asks for global scratch memory"):
            Launcher(source, metadata)
