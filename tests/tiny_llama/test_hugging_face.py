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
    "dict(labels=tokens * 0 - 100, num_items_in_batch=torch.tensor(7))", "dict(use_cache=True)",
    "dict(position_ids=torch.arange(3, 20).expand(2, 17).to(tokens.device), output_hidden_states=True)",
])  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(models, tokens, keywords):
    """Also of a model with frozen weights, and the logits are not overwritten."""
    for model in models:
        first_layer, last_layer = model.model.layers
        first_layer.self_attn.k_proj.requires_grad_(False)
        last_layer.input_layernorm.requires_grad_(False)
    keywords = eval(keywords, dict(tokens=tokens, torch=torch))
    expected, actual = (loss_and_gradients(model, tokens, **keywords) for model in models)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert {type(module).__module__ for module in last_layer.children()} == {"tiny_llama.hugging_face"}


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
    assert ours.generation_config == theirs.generation_config and ours.config.use_cache  # which others will read
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


# What is named, and what is done to a model before the kernels are put in or afterwards.
PASSED_BY = """
q_proj               | layer.self_attn.q_proj.register_forward_hook(print)
up_proj              | layer.mlp.up_proj.register_full_backward_pre_hook(print)
o_proj               | layer.self_attn.o_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
down_proj            | layer.mlp.down_proj.forward = print  # as accelerate's offload
v_proj               | layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(16))
k_proj               | torch.nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
gate_proj            | layer.mlp.gate_proj._parameters["weight"] = torch.ones(48, 32)  # as FSDP
up_proj              | layer.mlp.up_proj.to("meta")
norm                 | torch.nn.utils.parametrizations.weight_norm(layer.input_layernorm)
act_fn               | layer.mlp.act_fn = torch.nn.GELU()
Sharded              | layer.mlp.__class__ = type("Sharded", (type(layer.mlp),), {})  # as FSDP2
Sharded              | layer.__class__ = type("Sharded", (type(layer),), {})
Sharded              | model.model.__class__ = type("Sharded", (type(model.model),), {})
Sharded              | model.__class__ = type("Sharded", (type(model),), {})
share their memory   | layer.mlp.up_proj.weight.data = torch.ones(2, 48, 32)[1]  # as DeepSpeed
differ in type       | layer.mlp.up_proj.weight.data = torch.ones(48, 32).half()
is_causal            | layer.self_attn.is_causal = False
scaling              | layer.self_attn.scaling = 1.0
attention_dropout    | layer.self_attn.attention_dropout = 0.1
attn_implementation  | model.set_attn_implementation("eager")
"""


@pytest.mark.parametrize("is_first", [False, True], ids=["before", "afterwards"])
@pytest.mark.parametrize("line", PASSED_BY.strip().splitlines())
def test_what_our_operations_would_pass_by_is_refused(line, is_first):
    model, (named, change) = make_model(), line.split("|")
    if is_first:
        hugging_face.swap_kernels(model)
    exec(change.strip(), dict(model=model, layer=model.model.layers[1], torch=torch, __name__=__name__))
    with pytest.raises(llama.UsageError, match=named.strip()):
        is_first or hugging_face.swap_kernels(model)
        model(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("name", ["LlamaModel", "GraniteForCausalLM", "MistralForCausalLM"])
def test_another_model_is_refused(name):
    kind = getattr(transformers, name)
    with pytest.raises(llama.UsageError, match=name):
        hugging_face.swap_kernels(kind(kind.config_class(**SIZES)))


def test_arguments_that_our_attention_lacks_are_refused_by_name(models, tokens, monkeypatch):
    masks = transformers.masking_utils.create_causal_mask  # which benchmarks.steps replaces
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", masks)
    positions = torch.arange(17, device=tokens.device)
    lacking = dict(attention_mask=(positions > 2).long().repeat(2, 1), cu_seq_lens_q=positions, misspelt=False)
    lacking["position_ids"] = positions + positions[:2, None]
    for name, value in lacking.items():
        with pytest.raises(ValueError, match=f"no padding, packing or cache.*{name}"):
            models[1](input_ids=tokens, **{name: value})


def test_a_model_continues_padded_texts(models, tokens):
    """As the code of transformers does, with its cache."""
    settings = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, attention_mask=(tokens > 9).long())
    ours, theirs = (model.generate(tokens, **settings) for model in models)
    torch.testing.assert_close(ours, theirs)
