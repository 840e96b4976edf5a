"""The figures of a file of machine code: what it needs, and one line where it cannot be read."""

import json
from pathlib import Path

import pytest

from offline import figures

CODE = """\t.amdgcn_target "{target}"
copy_kernel:
\ts_load_dwordx4 s[0:3], s[0:1], 0x0
\tbuffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
\tbuffer_load_dwordx4 v6, s[0:3], 0 offen lds
\tglobal_load_ushort v7, v[8:9], off
\tds_read_b128 v[10:13], v0 offset:16
\tv_mfma_f32_16x16x32_f16 a[0:3], v[2:5], v[10:13], a[0:3]
\tglobal_store_dwordx2 v[8:9], v[10:11], off
\ts_endpgm
; Occupancy: 3
  - .agpr_count:     32
    .max_flat_workgroup_size: {threads}
    .private_segment_fixed_size: 24
    .sgpr_count:     40
    .sgpr_spill_count: 0
    .vgpr_count:     132
    .vgpr_spill_count: 6
"""
OLD, NEW = "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-", "amdgpu9.50-amd-amdhsa-unknown-gfx950"


@pytest.fixture
def file(tmp_path):
    """file(text, shared) writes a kernel, and what Triton's cache has beside it unless shared is None."""

    def write(text, shared=None):
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.amdgcn"
        path.write_text(text)
        if shared is not None:
            path.with_suffix(".json").write_text(json.dumps({"shared": shared}))
        return str(path)

    return write


def test_each_file_is_a_row(file, capsys):
    """132 registers are held as 136: three waves fit on each scheduler, so three programs of four on a unit."""
    paths = file(CODE.format(target=OLD, threads=256), 32768), file(CODE.format(target=NEW, threads=256), 1024)
    assert figures.main(paths) == 0
    _, old, new = capsys.readouterr().out.splitlines()
    counts = ["4", "132", "6", "24"]
    instructions = "1 v_mfma_f32_16x16x32_f16, 2 load 128, 1 load 16, 1 store 64".split()
    assert old.split() == [paths[0], "gfx942", *counts, "32.0", "25%,", "shared", "memory", *instructions]
    assert new.split() == [paths[1], "gfx950", *counts, "1.00", "38%,", "registers", *instructions]


def test_waves_of_a_radeon_have_32_lanes(file, capsys):
    assert figures.main([file(CODE.format(target="amdgcn-amd-amdhsa--gfx1100", threads=256), 1024)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["gfx1100", "8"]


def test_shared_memory_may_be_given(file, capsys):
    """More than what is beside the file; eight waves make one program on a unit of two."""
    assert figures.main([file(CODE.format(target=NEW, threads=512), 0), "--shared", "131072"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[2] == "8" and cells[6:8] == ["128", "25%,"]


@pytest.mark.parametrize("text, beside, message", [
    ("# a page", "{}", "is no machine code of one kernel"), (2 * CODE, "{}", "is no machine code of one kernel"),
    (CODE.replace("; Occupancy: 3", ""), "{}", "is no machine code of one kernel"),
    (CODE.replace("{target}", "amdgcn-amd-amdhsa--gfx1030"), "{}", "is for gfx1030, .* give one for gfx90a, gfx942"),
    (CODE, None, "no .json of Triton beside it, .* give --shared"), (CODE, "[", "no .json of Triton beside it"),
    (CODE, "{}", "no .json of Triton beside it"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(file, capsys, text, beside, message):
    path = file(text.format(target=NEW, threads=256))
    if beside is not None:
        Path(path).with_suffix(".json").write_text(beside)
    assert figures.main([path]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    with pytest.raises(figures.UsageError, match=rf"{path} .*{message}"):
        figures.figures(Path(path), None)
