"""The attention of wide heads on a Hopper GPU. Each test has a process and a limit: a wrong barrier hangs."""

import pytest
import torch

import tiny_llama_v3 as llama
from tests.tiny_llama.hopper_programs import needs_hopper, run

BEGIN = """
import json, math, torch, tiny_llama_v3 as llama
from tiny_llama import attention_hopper as hopper

hopper.SHORTEST = 1
hopper.llama.get_gpu("cuda")
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
def exact_gradients(q, k, v, o_grad, tables):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(exact(*leaves)[0], leaves, o_grad.double())
    return [*(rotated_back(x, tables) for x in gradients[:2]), gradients[2]]
def rotated_back(x, tables):
    if tables is None:
        return x
    (cos, sin), (first, second) = (t.double()[:, None] for t in tables), x.chunk(2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
def backward(o_grad, saved, tables, launch=None):
    q, k, v, _, lse = saved
    batch, seq_len, num_heads, dim = q.shape
    packed = q.new_full((batch, seq_len, (num_heads + 2 * k.shape[2]) * dim), math.nan)
    gradients = llama.split_heads(packed, num_heads, k.shape[2])
    assert (launch or hopper.launch_backward)(o_grad, saved, gradients, torch.full_like(lse, math.nan), tables)
    return gradients
def plain(o_grad, saved, gradients, delta, tables):
    kept, hopper.launch_backward = hopper.launch_backward, lambda *tensors: False
    llama.flash_attention_backward(o_grad, saved, gradients, tables)
    hopper.launch_backward = kept
    return True
def difference(x, y):
    return ((x - y).norm() / y.norm()).item()
torch.manual_seed(0)
"""


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
    errors = run(
        BEGIN
        + f"""
q, k, v = heads(*{shape}, torch.{dtype}, {head_dim})
(o, lse), (again, lse_again), (exact_o, exact_lse) = forward(q, k, v), forward(q, k, v), exact(q, k, v)
same = torch.equal(o, again) and torch.equal(lse, lse_again)
print(json.dumps([((o - exact_o).norm() / exact_o.norm()).item(), (lse - exact_lse).abs().max().item(), same]))
"""
    )
    assert errors[0] < tolerance and errors[1] < 1e-5 and errors[2]


@needs_hopper
@pytest.mark.parametrize("head_dim", [80, 128])
def test_it_stores_nothing_beside_its_output_and_can_be_captured(head_dim):
    assert run(
        BEGIN
        + f"head_dim = {head_dim}"
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
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 1e-2), ("float16", 1.5e-3)])
@pytest.mark.parametrize(
    "shape, head_dim",
    [
        ((5, 1000, 16, 4), 128),
        ((17, 1000, 8, 1), 128),
        ((33, 516, 4, 4), 128),
        ((140, 4, 1, 1), 128),
        ((9, 1000, 16, 2), 80),
        ((12, 388, 6, 3), 96),
        ((12, 132, 12, 6), 112),
        ((9, 1000, 16, 4), 64),
        ((33, 516, 4, 4), 64),
        ((140, 4, 1, 1), 64),
    ],
)
def test_gradients_are_right_and_have_the_same_bits(shape, head_dim, dtype, tolerance):
    assert run(
        BEGIN
        + f"""
q, k, v = heads(*{shape}, torch.{dtype}, {head_dim})
o_grad, saved = torch.randn_like(q), (q, k, v, *llama.flash_attention_forward(q, k, v))
right = []
for tables in (None, llama.rope_tables(q.shape[1], {head_dim}, "cuda")):
    ours, again = backward(o_grad, saved, tables), backward(o_grad, saved, tables)
    others, wants = backward(o_grad, saved, tables, plain), exact_gradients(q, k, v, o_grad, tables)
    for x, same, other, want in zip(ours, again, others, wants):
        error, of_plain = difference(x, want), difference(other, want)
        print(error, of_plain, torch.equal(x, other))
        right += [torch.equal(x, same), error < {tolerance}, error < 1.02 * of_plain]
print(json.dumps(all(right)))
"""
    )


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_it_stores_nothing_beside_its_gradients_and_can_be_captured(head_dim):
    assert run(
        BEGIN
        + f"head_dim = {head_dim}"
        + """
q, k, v = heads(9, 1000, 8, 2, torch.bfloat16, head_dim)
saved, tables = (q, k, v, *llama.flash_attention_forward(q, k, v)), llama.rope_tables(1000, head_dim, "cuda")
o_grad = torch.randn_like(q)
want, delta_room = backward(o_grad, saved, tables), q.new_full((9 * 8 * 1000 + 256,), math.nan, dtype=torch.float32)
wide = q.new_full((9, 1040, 12, 128), math.nan)
gradients = wide[:, 20:1020, :, :head_dim].split([8, 2, 2], 2)
arguments = o_grad, saved, gradients, delta_room[128:-128].view(9, 8, 1000), tables
assert hopper.launch_backward(*arguments)
wide.fill_(math.nan)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(20):
        assert hopper.launch_backward(*arguments)
graph.replay()
beside = wide[:, :20], wide[:, 1020:], wide[..., head_dim:], delta_room[:128], delta_room[-128:]
same = all(torch.equal(x, y) for x, y in zip(gradients, want))
print(json.dumps(same and all(x.isnan().all().item() for x in beside)))
"""
    )


@needs_hopper
def test_gradients_that_it_does_not_compute_are_left_to_plain_triton():
    assert run(
        BEGIN
        + """
def tensors(batch=9, seq_len=1000, dim=128):
    q, k, v = heads(batch, seq_len, 8, 2, torch.bfloat16, dim)
    lse, room = q.new_zeros(batch, 8, seq_len, dtype=torch.float32), q.new_full((batch, seq_len, 12, dim), math.nan)
    o_grad = torch.randn_like(q)
    gradients, delta = room.split([8, 2, 2], 2), lse + math.nan
    return dict(o_grad=o_grad, q=q, k=k, v=v, o=o_grad.clone(), lse=lse, gradients=gradients, delta=delta)
def refuses(o_grad, gradients, delta, **saved):
    launched = hopper.launch_backward(o_grad, tuple(saved.values()), gradients, delta, None)
    torch.cuda.synchronize()
    return not launched and all(x.isnan().all().item() for x in (*gradients, delta))
def moved(t):
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)
base = tensors()
changes = [dict([(name, base[name].half())]) for name in ("k", "v", "o")]
changes += [dict([(name, moved(base[name]))]) for name in ("o_grad", "lse", "delta")]
changes += dict(gradients=[x.float() for x in base["gradients"]]), dict(lse=base["lse"].mT.contiguous().mT)
refused = [refuses(**base | change) for change in changes]
others = dict(seq_len=1001), dict(batch=8), dict(dim=72), dict(dim=48), dict(dim=32)
refused += [refuses(**tensors(**sizes)) for sizes in others]
right = []
for seq_len in (1000, 1001):
    q, k, v = heads(9, seq_len, 8, 2, torch.bfloat16)
    saved, o_grad = (q, k, v, *forward(q, k, v)), torch.randn_like(q)
    gradients, seen, launch = [torch.full_like(x, math.nan) for x in (q, k, v)], [], hopper.launch_backward
    hopper.launch_backward = lambda *tensors: seen.append(launch(*tensors)) or seen[-1]
    llama.flash_attention_backward(o_grad, saved, gradients)
    hopper.launch_backward = launch
    wants = exact_gradients(q, k, v, o_grad, None)
    right += [seen == [seq_len == 1000], *(difference(x, want) < 1e-2 for x, want in zip(gradients, wants))]
print(refused, right)
print(json.dumps(all(refused + right)))
"""
    )


@needs_hopper
def test_other_types_and_places_are_refused_or_right_after_a_launch():
    """A compiled kernel is found by what it was compiled for: the types of all tensors, and where lse begins."""
    assert run(
        BEGIN
        + """
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
"""
    )


@needs_hopper
def test_a_sequence_that_the_backward_pass_cannot_take_is_refused_forward():
    assert run(
        BEGIN
        + """
memory = torch.empty(2**32 + 2**26, device="cuda", dtype=torch.bfloat16)
q, k, v = (memory[n * 2**20 :].as_strided((1, 1024, 132, 128), (2**32, 2**22, 128, 1)) for n in range(3))
for t in (q, k, v):
    t.normal_()
try:
    llama.flash_attention_forward(q, k, v)
    print("false")
except ValueError as error:
    print(json.dumps("count within a sequence in 32 bits" in str(error)))
"""
    )


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_step_has_the_loss_and_the_gradients_of_plain_triton(head_dim):
    errors = run(
        BEGIN
        + f"head_dim = {head_dim}"
        + """
sizes = dict(hidden_dim=8 * head_dim, num_heads=8, num_kv_heads=2, num_layers=1)
sizes |= dict(seq_len=1024, batch_size=9, vocab_size=64)
config = llama.Config(**sizes, use_amp=True)
seen = []
def watched(launch):
    return lambda *tensors: seen.append(launch(*tensors)) or seen[-1]
hopper.launch_forward, hopper.launch_backward = watched(hopper.launch_forward), watched(hopper.launch_backward)
def gradients():
    torch.manual_seed(0)
    step = llama.TrainStep(config, torch.device("cuda"))
    step.load(*next(llama.batches(config)))
    step.run()
    return step.loss.item(), step.optimizer.grad.float().clone()
ours = gradients()
hopper.launch_forward = hopper.launch_backward = lambda *tensors: False
plain = gradients()
print(json.dumps([ours[0] - plain[0], difference(ours[1], plain[1]), seen]))
"""
    )
    assert abs(errors[0]) < 1e-3 and errors[1] < 1e-2 and errors[2] == [head_dim == 128, True]


def test_what_it_does_not_serve_is_left_to_plain_triton(monkeypatch, without_launches):
    hopper, Tensor = without_launches("attention_hopper")
    q = torch.zeros(16, 1024, 16, 128, dtype=torch.bfloat16, device="meta")
    assert not hopper.launch_forward(q, q, q, q, None)  # of no GPU
    serves = []
    monkeypatch.setattr(hopper, "descriptor", lambda *arguments: serves.append(arguments))

    def fits(t, arch="sm_90", **others):
        """Return whether forward and backward are served."""
        monkeypatch.setattr(hopper.llama, "get_gpu", lambda kind: llama.Gpu("cuda", "GPU", arch, 132, 32))
        t = t.as_subclass(Tensor)
        lse = torch.zeros(t.shape[0], t.shape[2], t.shape[1], device="meta").as_subclass(Tensor)
        tensors = dict(q=t, k=t, v=t, o=t, lse=lse, o_grad=t, q_grad=t, k_grad=t, v_grad=t, delta=lse)
        *saved, o_grad, q_grad, k_grad, v_grad, delta = (tensors | others).values()
        backward = hopper.launch_backward(o_grad, saved, (q_grad, k_grad, v_grad), delta, None)
        return hopper.launch_forward(*saved), backward

    assert fits(q) == (True, True) and len(serves) == 8 + 2 + 4
    for refused in (q.float(), q[..., :32], q[..., :100], q[:, :508]):
        assert fits(refused) == (False, False)
    assert fits(q, "sm_100") == (False, False)
    assert fits(q.transpose(2, 3).contiguous().transpose(2, 3)) == (False, False)  # rows with gaps
    assert fits(q[:1, :512]) == (False, False)  # fewer tiles than multiprocessors
    half, few = q.half().as_subclass(Tensor), q[:2, :, :4].as_subclass(Tensor)
    assert fits(q[:2], k=few, v=few, k_grad=few, v_grad=few) == (True, False)  # of keys
    for head_dim in (72, 88, 112):
        assert fits(q[..., :head_dim]) == (True, head_dim == 112)
    assert fits(q[..., :48]) == (False, False) and fits(q[..., :64]) == (False, True)
    assert fits(q[:, :1001]) == (True, False) and fits(q[:, :1000]) == (True, True)  # rows of lse
    for name in ("o_grad", "q_grad", "k_grad", "v_grad"):
        assert fits(q, **{name: half}) == (True, False)
    lse = torch.zeros(16, 16, 1024, device="meta").as_subclass(Tensor)
    assert fits(q, delta=lse.double()) == fits(q, delta=lse.mT.contiguous().mT) == (True, False)
