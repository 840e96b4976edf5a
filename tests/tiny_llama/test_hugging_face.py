"""A LLaMA of transformers with our kernels: the same loss and gradients, the same parameters, refusals by name."""

import copy
import functools

import pytest
import torch

import tiny_llama_v3 as llama

transformers = pytest.importorskip("transformers")
if llama.triton is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
hugging_face = pytest.importorskip("tiny_llama.hugging_face")

SIZES = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32, attn_implementation="sdpa")


def make_model(device="cpu", **changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes)).to(device)


@pytest.fixture
def models(device):
    """The same model with the code of transformers and with our kernels; its embeddings have scaled positions."""
    theirs = make_model(device, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1000.0))
    return theirs, hugging_face.swap_kernels(copy.deepcopy(theirs))


@pytest.fixture
def tokens(device):
    return torch.randint(37, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)


def loss_and_gradients(model, tokens, autocast=False, **keywords):
    model.zero_grad()
    labels = tokens.masked_fill(tokens == 5, -100)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=labels, **keywords).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("keywords", [{}, {"num_items_in_batch": 7}])
def test_loss_and_gradients_are_those_of_transformers(models, tokens, keywords):
    expected, actual = (loss_and_gradients(model, tokens, **keywords) for model in models)
    assert max(llama.relative_errors(actual, expected).values()) < 1e-5
    assert {type(module).__module__ for module in models[1].model.layers[1].children()} == {"tiny_llama.hugging_face"}


def test_weights_are_stacked_once_and_stay_those_of_transformers(models, tokens, tmp_path):
    theirs, ours = models
    mlp, tokens = ours.model.layers[0].mlp, tokens[:, :4]
    with torch.inference_mode():
        ours(tokens)
    stack = mlp.stack
    for model in models:
        loss_and_gradients(model, tokens)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_same(ours, theirs, tokens)
    assert mlp.stack is stack and stack.data_ptr() == mlp.gate_proj.weight.data_ptr()
    assert [name for name, _ in ours.named_parameters()] == list(theirs.state_dict())
    ours.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(tokens.device)
    mlp.up_proj.weight = torch.nn.Parameter(2 * mlp.up_proj.weight.detach())  # what was stacked is old
    with torch.no_grad():
        again.model.layers[0].mlp.up_proj.weight *= 2
    assert_same(ours, again, tokens)


def assert_same(ours, theirs, tokens):
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operations", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_autocast_rounds_as_with_transformers(models, tokens, monkeypatch, operations):
    """The interpreter multiplies bf16 wrongly."""
    monkeypatch.setattr(hugging_face, "OPERATIONS", llama.OPERATIONS[operations])
    exact = copy.deepcopy(loss_and_gradients(models[0], tokens))
    plain, ours = (llama.relative_errors(loss_and_gradients(model, tokens, autocast=True), exact) for model in models)
    assert not llama.judge(ours, plain, llama.CHECK_ATOL["bf16"]).failed


@pytest.mark.parametrize("cast, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_tensors_are_cast_where_the_kernels_refuse_autocast(cast, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        x, y = hugging_face.outside_autocast(lambda x: (x, x @ x), torch.ones(3, 3), cast=cast)
    assert x.dtype == y.dtype == dtype  # autocast would have cast the product


@pytest.mark.parametrize("changes", [
    dict(attention_bias=True), dict(mlp_bias=True), dict(hidden_act="gelu"), dict(attention_dropout=0.1),
])  # fmt: skip
def test_another_model_is_refused(changes):
    with pytest.raises(llama.UsageError, match="hidden_act must be 'silu', without biases"):
        hugging_face.swap_kernels(make_model(**changes))


def test_what_our_attention_lacks_is_refused(models, tokens, monkeypatch):
    masks = transformers.masking_utils.create_causal_mask  # which benchmarks.steps replaces
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", masks)
    positions = torch.arange(17, device=tokens.device)
    lacking = dict(attention_mask=(positions > 2).long().repeat(2, 1), use_cache=True)
    lacking["position_ids"] = positions + positions[:2, None]
    calls = [functools.partial(models[1], input_ids=tokens, **{name: value}) for name, value in lacking.items()]
    for name in ("past_key_values", "cache", "cu_seq_lens_q"):  # whichever this release has
        calls.append(functools.partial(models[1].model.layers[0].self_attn, None, None, **{name: 0}))
    for call in calls:
        with pytest.raises(ValueError, match="no padding, packing or cache|same positions in all rows"):
            call()


def test_a_model_continues_a_text(models, tokens):
    prompt, settings = tokens[:1, :9], dict(max_new_tokens=2, do_sample=False, pad_token_id=0)  # without padding
    ours, theirs = (model.generate(prompt, **settings) for model in models)
    torch.testing.assert_close(ours, theirs)
