"""A LLaMA of transformers with our kernels: the same loss and gradients, the same parameters, refusals by name."""

import copy

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
    keywords = dict(labels=tokens.masked_fill(tokens == 5, -100)) | keywords
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        result = model(input_ids=tokens, **keywords)
    result.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": result.loss.detach(), "logits": result.logits.detach(), **gradients}


@pytest.mark.parametrize("keywords", [
    "{}", "dict(num_items_in_batch=7)", "dict(shift_labels=tokens.flip(1))", "dict(ignore_index=3)",
    "dict(labels=tokens * 0 - 100, num_items_in_batch=torch.tensor(7))", "dict(output_hidden_states=True)",
    "dict(position_ids=torch.arange(3, 20).to(tokens.device)[None])",
])  # fmt: skip
def test_our_kernels_compute_loss_and_gradients_of_transformers(models, tokens, monkeypatch, keywords):
    """Also of a model with frozen weights, and the logits are not overwritten."""
    keywords = eval(keywords, dict(tokens=tokens, torch=torch))
    for model in models:
        first_layer, last_layer = model.model.layers
        first_layer.self_attn.k_proj.requires_grad_(False)
        last_layer.input_layernorm.requires_grad_(False)
    expected = loss_and_gradients(models[0], tokens, **keywords)
    for theirs in ("LlamaRMSNorm.forward", "LlamaAttention.forward", "LlamaMLP.forward", "ForCausalLMLoss"):
        monkeypatch.setattr(f"tiny_llama.hugging_face.{theirs}", None)
    assert_close(loss_and_gradients(models[1], tokens, **keywords), expected)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Adapted(torch.nn.Module):
    """As LoRA has it: the linear layer is frozen, what is added to it learns."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.added = torch.nn.Parameter(torch.full_like(linear.weight, 0.1))

    def forward(self, x):
        return self.linear(x) + torch.nn.functional.linear(x, self.added)


# What others do to a model, or give to it, before the kernels are put in or afterwards.
CHANGES = """
layer.self_attn.q_proj.register_forward_hook(lambda module, given, result: 2 * result)
layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
layer.mlp.down_proj.forward = lambda x: x[..., :32]
layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(16, device=device))
torch.nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
torch.nn.utils.parametrizations.weight_norm(layer.input_layernorm, dim=None)
layer.mlp.act_fn = torch.nn.GELU()
layer.self_attn.is_causal = False
layer.self_attn.scaling = 1.0
layer.self_attn.attention_dropout = 0.5
model.set_attn_implementation("eager")
model.double()
keywords["attention_mask"] = (torch.arange(17, device=device) > 2).long().repeat(2, 1)
keywords["position_ids"] = torch.arange(17, device=device) + torch.arange(2, device=device)[:, None]
keywords["use_cache"] = True
"""


@pytest.mark.parametrize("is_first", [False, True], ids=["before", "afterwards"])
@pytest.mark.parametrize("change", CHANGES.strip().splitlines())
def test_what_others_change_counts(device, tokens, change, is_first):
    results = []
    for swap in (lambda model: model, hugging_face.swap_kernels):
        model, keywords = make_model(device), {}
        if is_first:
            swap(model)
        torch.manual_seed(0)
        given = dict(model=model, layer=model.model.layers[1], keywords=keywords, device=device)
        exec(change, globals() | given)
        results.append(loss_and_gradients(model if is_first else swap(model), tokens, **keywords))
    assert_close(*results)


def test_weights_stay_those_of_transformers(models, tokens, tmp_path):
    theirs, ours = models
    for model in models:
        loss_and_gradients(model, tokens)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    ours.save_pretrained(tmp_path)
    assert ours.generation_config == theirs.generation_config and ours.config.use_cache  # which others will read
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(tokens.device)
    assert_close([model(tokens).logits for model in (ours, again)], [theirs(tokens).logits] * 2)


@pytest.mark.gpu  # the interpreter multiplies bf16 wrongly
def test_autocast_rounds_as_with_transformers(models, tokens):
    exact = copy.deepcopy(loss_and_gradients(models[0], tokens))
    plain, ours = (llama.relative_errors(loss_and_gradients(model, tokens, autocast=True), exact) for model in models)
    assert not llama.judge(ours, plain, llama.CHECK_ATOL["bf16"]).failed


def test_types_stay_where_the_kernels_refuse_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = hugging_face.outside_autocast(lambda x: x @ x, torch.ones(3, 3))
    assert y.dtype == torch.float32  # autocast would have cast the product


@pytest.mark.parametrize("name", ["LlamaModel", "GraniteForCausalLM"])
def test_another_model_is_refused(name):
    kind = getattr(transformers, name)
    with pytest.raises(llama.UsageError, match=name):
        hugging_face.swap_kernels(kind(kind.config_class(**SIZES)))


def test_a_model_continues_padded_texts(models, tokens):
    """As the code of transformers does, with its cache."""
    settings = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, attention_mask=(tokens > 9).long())
    ours, theirs = (model.generate(tokens, **settings) for model in models)
    torch.testing.assert_close(ours, theirs)
