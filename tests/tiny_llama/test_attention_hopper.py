"""The attention of heads of 72 to 128 on a Hopper GPU. Each test has a process and a limit: a wrong barrier hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama

ROOT = Path(__file__).resolve().parents[2]
IS_HOPPER = torch.cuda.is_available() and llama.get_device("cuda").arch == "sm_90"
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of sm_90")
BEGIN = """
import json, math, torch, tiny_llama_v3 as llama
from tiny_llama import attention_hopper as hopper

hopper.SHORTEST = 1
hopper.llama.get_device("cuda")
def exact(q, k, v):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[2:], device="cuda").triu(1).bool(), -math.inf)
    return (scores.softmax(3) @ v).transpose(1, 2), scores.logsumexp(3) / math.log(2)
def forward(q, k, v):
    batch, seq_len, num_heads, _ = q.shape
    o = q.new_full(q.shape, math.nan)
    lse = q.new_full((batch, num_heads, seq_len), math.nan, dtype=torch.float32)
    assert hopper.launch_forward(q, k, v, o, lse)
    return o, lse
def heads(batch, seq, heads, kv_heads, dtype, dim=128):
    packed = torch.randn(batch, seq, (heads + 2 * kv_heads) * dim, device="cuda", dtype=dtype)
    return llama.split_heads(packed, heads, kv_heads)
torch.manual_seed(0)
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_hopper
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 3e-3), ("float16", 4e-4)])
@pytest.mark.parametrize(
    "shape, head_dim",
    [
        ((2, 1024, 16, 4), 128),
        ((9, 1000, 16, 1), 80),
        ((33, 513, 4, 4), 72),
        ((140, 1, 1, 1), 128),
        ((12, 129, 12, 6), 112),
        ((3, 1100, 8, 4), 96),
    ],
)
def test_it_is_right_and_gives_the_same_bits(shape, head_dim, dtype, tolerance):
    errors = run(f"""
q, k, v = heads(*{shape}, torch.{dtype}, {head_dim})
(o, lse), (again, lse_again), (exact_o, exact_lse) = forward(q, k, v), forward(q, k, v), exact(q, k, v)
same = torch.equal(o, again) and torch.equal(lse, lse_again)
print(json.dumps([((o - exact_o).norm() / exact_o.norm()).item(), (lse - exact_lse).abs().max().item(), same]))
""")
    assert errors[0] < tolerance and errors[1] < 1e-5 and errors[2]


@needs_hopper
@pytest.mark.parametrize("head_dim", [80, 128])
def test_it_stores_nothing_beside_its_output_and_can_be_captured(head_dim):
    assert run(
        f"head_dim = {head_dim}"
        + """
q, k, v = heads(4, 1100, 8, 2, torch.bfloat16, head_dim)
want, want_lse = forward(q, k, v)
wide = q.new_full((4, 1140, 8, 128), math.nan)
room, lse_room = wide[..., :head_dim], want_lse.new_full((4 * 8 * 1100 + 256,), math.nan)
o, lse = room[:, 20:1120], lse_room[128:-128].view(4, 8, 1100)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(100):
        assert hopper.launch_forward(q, k, v, o, lse)
graph.replay()
beside = room[:, :20], room[:, 1120:], wide[..., head_dim:], lse_room[:128], lse_room[-128:]
print(json.dumps(torch.equal(o, want) and torch.equal(lse, want_lse) and all(x.isnan().all().item() for x in beside)))
"""
    )


@needs_hopper
def test_other_types_and_places_are_refused_or_right_after_a_launch():
    """A compiled kernel is found by what it was compiled for: the types of all tensors, and where lse begins."""
    assert run("""
q, k, v = heads(4, 1100, 8, 2, torch.bfloat16)
want, want_lse = forward(q, k, v)
refused = []
for changes in (dict(q=q.half()), dict(k=k.half()), dict(v=v.half()), dict(out=q.new_empty(q.shape).float())):
    try:
        llama.flash_attention_forward(**dict(q=q, k=k, v=v) | changes)
        refused.append(False)
    except TypeError as error:
        refused.append("convert them to one type" in str(error))
    tensors = dict(q=q, k=k, v=v, out=want.clone()) | changes
    refused.append(not hopper.launch_forward(*tensors.values(), want_lse.clone()))
o, lse = q.new_empty(q.shape), torch.empty(want_lse.numel() + 1, device="cuda")[1:].view_as(want_lse)
assert hopper.launch_forward(q, k, v, o, lse)
half = [x.half() for x in (q, k, v)]
difference = (llama.flash_attention_forward(*half)[0].float() - exact(*half)[0]).abs().max().item()
print(json.dumps(all(refused) and torch.equal(o, want) and torch.equal(lse, want_lse) and difference < 1e-2))
""")


@needs_hopper
def test_a_sequence_that_the_backward_pass_cannot_take_is_refused_forward():
    assert run("""
memory = torch.empty(2**32 + 2**26, device="cuda", dtype=torch.bfloat16)
q, k, v = (memory[n * 2**20 :].as_strided((1, 1024, 132, 128), (2**32, 2**22, 128, 1)) for n in range(3))
for t in (q, k, v):
    t.normal_()
try:
    llama.flash_attention_forward(q, k, v)
    print("false")
except ValueError as error:
    print(json.dumps("count within a sequence in 32 bits" in str(error)))
""")


@needs_hopper
def test_a_step_has_the_loss_and_the_gradients_of_plain_triton():
    errors = run("""
sizes = dict(hidden_dim=1024, num_heads=8, num_kv_heads=2, num_layers=1, seq_len=1024, batch_size=3, vocab_size=64)
config = llama.Config(**sizes, use_amp=True)
seen, launch = [], hopper.launch_forward
hopper.launch_forward = lambda *tensors: seen.append(launch(*tensors)) or seen[-1]
def gradients():
    torch.manual_seed(0)
    step = llama.TrainStep(config, llama.get_device("cuda"))
    step.load(*next(llama.batches(config)))
    step.run()
    return step.loss.item(), step.optimizer.grad.float().clone()
ours = gradients()
hopper.launch_forward = lambda *tensors: False
plain = gradients()
print(json.dumps([ours[0] - plain[0], ((ours[1] - plain[1]).norm() / plain[1].norm()).item(), seen]))
""")
    assert abs(errors[0]) < 1e-3 and errors[1] < 1e-2 and errors[2] == [True]


def test_what_it_does_not_serve_is_left_to_plain_triton(monkeypatch):
    hopper = llama.companion("attention_hopper")
    if hopper is None:
        pytest.skip("Triton is older than 3.6, or there is none")
    q = torch.zeros(16, 1024, 16, 128, dtype=torch.bfloat16, device="meta")
    assert not hopper.launch_forward(q, q, q, q, None)  # of no GPU
    serves = []
    monkeypatch.setattr(hopper, "descriptor", lambda *arguments: serves.append(arguments) or None)

    class Tensor(torch.Tensor):
        is_cuda = True

        def data_ptr(self):
            return 0

        def get_device(self):
            return 0

    def fits(t, arch="sm_90"):
        monkeypatch.setattr(hopper.llama, "get_device", lambda kind: llama.Device("cuda", "GPU", arch, 132, 32))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(hopper, "launch", lambda *arguments: None)
        t = t.as_subclass(Tensor)
        lse = torch.zeros(1).as_subclass(Tensor)
        return hopper.launch_forward(t, t, t, t, lse)

    assert fits(q) and len(serves) == 4
    assert not fits(q, "sm_100") and not fits(q.float()) and not fits(q[..., :64])
    assert fits(q[..., :72]) and not fits(q[..., :100])
    assert not fits(q[:, :511]) and not fits(q[:1, :512])  # short, or fewer tiles than multiprocessors
    assert not fits(q.transpose(2, 3).contiguous().transpose(2, 3))  # rows with gaps
