"""The product in MX formats: its arithmetic, and the instructions that it becomes on MI350."""

import pytest
import torch

import tiny_llama_v3 as llama
from compiled import gate, recorded
from compiled.scaled_matmul import FORMATS, SCALED, scaled_matmul
from tests.fakes.machine import first_fast

pytestmark = pytest.mark.skipif(llama.triton is None, reason="needs Triton")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decoded(data, scale, format):
    if format == "e2m1":
        values = E2M1[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]
    else:
        values = data.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]).double()
    return values * (scale.double() - 127).exp2().repeat_interleave(SCALED, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for GPUs that have such instructions, and for the interpreter")
@pytest.mark.parametrize("format", FORMATS)
def test_product_is_that_of_the_decoded_values(format):
    torch.manual_seed(0)
    # Bytes of less than 0x70 are finite in all formats; of e2m1 they have negative values too.
    x, weight = (torch.randint(0x70, (rows, 256 // FORMATS[format])).byte() for rows in (64, 32))
    scales = [torch.randint(120, 135, (len(t), 256 // SCALED)).byte() for t in (x, weight)]
    out = scaled_matmul(x, scales[0], weight, scales[1], format, block=32)
    expected = decoded(x, scales[0], format) @ decoded(weight, scales[1], format).T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("format", first_fast("e2m1", "e4m3", "e5m2"))
def test_becomes_the_scaled_instructions_of_mi350(format):
    jobs = recorded.jobs_for(["gfx950"], {"scaled-matmul": ["bf16"]})
    (row,), wrong = gate.analyse([job for job in jobs if job.launch.named_constants["FORMAT"] == format], 1)
    assert wrong == [] and format in row["tile"] and row["has_dot"] and row["wide_share"] > 0.9
    matrix = {name for name in row["instructions"] if "mfma" in name}
    assert matrix == {"v_mfma_scale_f32_32x32x64_f8f6f4"} and row["registers"] <= 160, row
