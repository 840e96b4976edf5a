"""SwiGLU inside its products on a Hopper GPU. Each test has a process and a limit: a wrong barrier hangs."""

import pytest
import torch

from tests.tiny_llama.hopper_programs import needs_hopper, run

BEGIN = """
import contextlib, json, math, torch, tiny_llama_v3 as llama
from tests.core.tiny import without_groups
from tiny_llama import swiglu_hopper as hopper

def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()
def inputs(rows, inner, ffn):
    x, y_grad = randn(rows, inner), randn(rows, inner)
    return x, randn(2 * ffn, inner, scale=inner**-0.5), y_grad, randn(inner, ffn, scale=inner**-0.5)
def nans(*shape):
    return torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
def forward(x, gate_up_weight):
    gate_up = nans(len(x), len(gate_up_weight))
    hidden = nans(len(x), len(gate_up_weight) // 2)
    assert hopper.launch_forward(x, gate_up_weight, gate_up, hidden)
    return gate_up, hidden
def backward(y_grad, down_weight, gate_up):
    gate_up = gate_up.clone()
    assert hopper.launch_backward(y_grad, down_weight, gate_up)
    return gate_up
def exact_backward(y_grad, down_weight, gate_up):
    gate, up = gate_up.double().chunk(2, 1)
    hidden_grad, sigmoid = y_grad.double() @ down_weight.double(), gate.sigmoid()
    return torch.cat((hidden_grad * up * sigmoid * (1 + gate * (1 - sigmoid)), hidden_grad * gate * sigmoid), 1)
def error(x, exact):
    return ((x - exact).norm() / exact.norm()).item()
torch.manual_seed(0)
"""


@needs_hopper
@pytest.mark.parametrize(
    "rows, inner, ffn",
    [(8192, 1024, 4096), (2000, 2048, 8192), (9001, 576, 1536), (4100, 968, 3000), (16384, 512, 1368)],
)
def test_it_is_right_and_has_the_bits_of_the_two_kernels_that_it_replaces(rows, inner, ffn):
    """The products have the error of the library's; the activation and its gradient those of plain Triton's kernels."""
    errors, same = run(
        BEGIN
        + f"""
x, gate_up_weight, y_grad, down_weight = inputs({rows}, {inner}, {ffn})
(gate_up, hidden), again = forward(x, gate_up_weight), forward(x, gate_up_weight)
exact = x.double() @ gate_up_weight.double().t()
errors = [error(gate_up, exact), error(x @ gate_up_weight.t(), exact)]
same = [torch.equal(gate_up, again[0]), torch.equal(hidden, again[1])]
same.append(torch.equal(hidden, llama.swiglu_activation(gate_up)))
gradient, again = backward(y_grad, down_weight, gate_up), backward(y_grad, down_weight, gate_up)
two_kernels = gate_up.clone()
llama.swiglu_activation_backward_(y_grad @ down_weight, two_kernels)
exact = exact_backward(y_grad, down_weight, gate_up)
errors += [error(gradient, exact), error(two_kernels, exact)]
print(json.dumps([errors, same + [torch.equal(gradient, again)]]))
"""
    )
    assert errors[0] <= 1.01 * errors[1] < 3e-3 and errors[2] <= 1.01 * errors[3] < 4e-3 and all(same)


@needs_hopper
def test_every_gate_has_the_bits_of_plain_triton():
    """The sigmoid has instructions of its own: every finite bf16 number as gate, and infinities."""
    assert run(
        BEGIN
        + """
gates = torch.arange(-(2**15), 2**15, device="cuda").short().view(torch.bfloat16)
gates = gates.where(~gates.isnan(), 0)
x, up = torch.zeros(2**16, 512, device="cuda", dtype=torch.bfloat16), randn(512)
x[:, 0] = gates.where(gates.isfinite(), 0)
x[:, 1] = 1
gate_up_weight = torch.zeros(1024, 512, device="cuda", dtype=torch.bfloat16)
gate_up_weight[:512, 0], gate_up_weight[512:, 1] = 1, up
gate_up, hidden = forward(x, gate_up_weight)
is_gate = torch.equal(gate_up[:, 0], x[:, 0])
gate_up[:, :512] = gates[:, None]
y_grad, down_weight = randn(2**16, 512), randn(512, 512)
gradient, two_kernels = backward(y_grad, down_weight, gate_up), gate_up.clone()
llama.swiglu_activation_backward_(y_grad @ down_weight, two_kernels)
finite = gates.isfinite()
same = torch.equal(hidden, llama.swiglu_activation(torch.cat((x[:, :1].expand(-1, 512), gate_up[:, 512:]), 1)))
same_gradient = torch.equal(gradient[finite].nan_to_num(3.0), two_kernels[finite].nan_to_num(3.0))
print(json.dumps(is_gate and same and same_gradient))
"""
    )


@needs_hopper
def test_it_writes_nothing_beside_its_results_and_can_be_captured():
    assert run(
        BEGIN
        + """
x, gate_up_weight, y_grad, down_weight = inputs(4100, 960, 1400)
want, want_hidden = forward(x, gate_up_weight)
want_gradient = backward(y_grad, down_weight, want)
room, hidden_room = nans(4300, 2832), nans(4300, 1440)
gate_up, hidden = room[100:4200, 16:2816], hidden_room[100:4200, 24:1424]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(20):
        assert hopper.launch_forward(x, gate_up_weight, gate_up, hidden)
graph.replay()
right = torch.equal(gate_up, want) and torch.equal(hidden, want_hidden)
assert hopper.launch_backward(y_grad, down_weight, gate_up)
right = right and torch.equal(gate_up, want_gradient)
gate_up.fill_(math.nan), hidden.fill_(math.nan)
print(json.dumps(right and room.isnan().all().item() and hidden_room.isnan().all().item()))
"""
    )


@needs_hopper
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", ["", "gate_up_proj", "down_proj"])
def test_a_step_has_the_bits_of_plain_triton(recompute, frozen):
    """Forward and backward, in a group and layer by layer."""
    assert run(
        BEGIN
        + f"recompute, frozen = {recompute}, {frozen!r}"
        + """
sizes = dict(hidden_dim=512, num_heads=8, num_kv_heads=2, num_layers=2, seq_len=1024, batch_size=9, vocab_size=64)
config = llama.Config(**sizes, ffn_dim=1536, use_amp=True, recompute=recompute)
seen, launches = [], (hopper.launch_forward, hopper.launch_backward)
def watched(launch):
    return lambda *tensors: seen.append(launch(*tensors)) or seen[-1]
def gradients(is_grouped):
    with contextlib.nullcontext() if is_grouped else without_groups():
        step = llama.TrainStep(config, "cuda")
    step.freeze(*[f"layers.0.feed_forward.{frozen}.weight"] * bool(frozen))
    step.load(*next(llama.batches(config)))
    step.run()
    return step.loss.item(), step.optimizer.grad.float().clone()
result = []
for is_grouped in (True, False):
    hopper.launch_forward, hopper.launch_backward = map(watched, launches)
    seen.clear()
    ours = gradients(is_grouped)
    served = len(seen) > 0 and all(seen)
    hopper.launch_forward = hopper.launch_backward = lambda *tensors: False
    plain = gradients(is_grouped)
    close = ((ours[1] - plain[1]).norm() / plain[1].norm()).item() < 1e-3
    result.append(served and abs(ours[0] - plain[0]) < 1e-5 and close)
print(json.dumps(all(result)))
"""
    )


@needs_hopper
def test_what_it_does_not_serve_it_leaves_alone():
    assert run(
        BEGIN
        + """
x, gate_up_weight, y_grad, down_weight = inputs(8192, 1024, 4096)
gate_up, hidden = nans(8192, 8192), nans(8192, 4096)
refused = [
    hopper.launch_forward(x.half(), gate_up_weight, gate_up, hidden),
    hopper.launch_forward(x, gate_up_weight.half(), gate_up, hidden),
    hopper.launch_forward(x, gate_up_weight, gate_up.half(), hidden),
    hopper.launch_forward(x, gate_up_weight, gate_up, hidden.float()),
    hopper.launch_forward(x[:, 4:-4], gate_up_weight[:, 4:-4], gate_up, hidden),  # no multiple of 16 bytes
    hopper.launch_forward(x[:, :192], gate_up_weight[:, :192], gate_up, hidden),  # three steps, and four pieces
    hopper.launch_forward(x[:256], gate_up_weight, gate_up[:256], hidden[:256]),  # few tiles
    hopper.launch_forward(x, gate_up_weight, gate_up, nans(8192, 4112)),  # padded
    hopper.launch_backward(y_grad, down_weight.half(), gate_up),
    hopper.launch_backward(y_grad[:, :448], down_weight[:448], gate_up),
    hopper.launch_backward(y_grad, down_weight.t().contiguous().t(), gate_up),
]
print(json.dumps(not any(refused) and gate_up.isnan().all().item() and hidden.isnan().all().item()))
"""
    )


def test_what_it_does_not_serve_is_left_to_the_library(monkeypatch, without_launches):
    hopper, Tensor = without_launches("swiglu_hopper")
    monkeypatch.setattr(hopper, "descriptor", lambda *arguments: None)

    def fits(rows=8192, inner=1024, ffn=4096, dtype=torch.bfloat16, kind=Tensor, more=0):
        """Return whether forward and backward are served; more columns are padding."""
        x, gate_up = (
            torch.zeros(rows, n, dtype=dtype, device="meta").as_subclass(kind) for n in (inner, 2 * ffn + more)
        )
        weights = [
            torch.zeros(*s, dtype=dtype, device="meta").as_subclass(kind) for s in ((2 * ffn, inner), (inner, ffn))
        ]
        hidden = torch.zeros(rows, ffn + more, dtype=dtype, device="meta").as_subclass(kind)
        forward = hopper.launch_forward(x, weights[0], gate_up, hidden)
        return forward, hopper.launch_backward(x, weights[1], gate_up)

    neither, both = (False, False), (True, True)
    assert fits() == fits(9001, 968, 3000) == fits(inner=456) == both
    assert fits(kind=torch.Tensor) == fits(dtype=torch.float16) == fits(dtype=torch.float32) == neither
    assert fits(inner=448) == fits(inner=200) == (True, False)  # fewer steps than backward's pieces, of which it has 8
    assert fits(inner=192) == fits(inner=1020) == fits(ffn=4092) == fits(more=16) == neither
    assert fits(256) == neither and fits(640) == (True, False)  # forward has 160 tiles then, backward 80
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert fits() == neither
