"""A LLaMA of transformers with our kernels: the same loss and gradients, the same parameters, refusals by name."""

import collections
import copy
import functools
import inspect
import types  # noqa: F401  (for what is evaluated)
import warnings

import pytest
import torch

import tiny_llama_v3 as llama

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa: E402
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

if llama.triton is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
hugging_face = pytest.importorskip("tiny_llama.hugging_face")

SIZES = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32, attn_implementation="sdpa")


create_causal_mask = modeling_llama.create_causal_mask


@pytest.fixture(autouse=True)
def own_mask(monkeypatch):
    """The mask of transformers, which benchmarks.steps replaces for the rest of its process."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_causal_mask)


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


def loss_and_gradients(model, tokens, autocast=None, **keywords):
    model.zero_grad()
    keywords = dict(labels=tokens.masked_fill(tokens == 5, -100)) | keywords
    with torch.autocast(tokens.device.type, autocast, enabled=autocast is not None):
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
layer.mlp.act_fn.register_forward_hook(lambda module, given, result: 2 * result)
layer.mlp.act_fn.register_forward_pre_hook(lambda module, given: (2 * given[0],))
layer.mlp.act_fn.register_full_backward_hook(lambda module, given, result: (2 * given[0],))
layer.mlp.act_fn.register_full_backward_pre_hook(lambda module, result: (2 * result[0],))
layer.mlp.act_fn.forward = lambda x: 2 * x
layer.self_attn.is_causal = False
layer.self_attn.scaling = 1.0
layer.self_attn.attention_dropout = 0.5
model.set_attn_implementation("eager")
model.double()
keywords["attention_mask"] = (torch.arange(17, device=device) > 2).long().repeat(2, 1)
keywords["position_ids"] = torch.arange(17, device=device) + torch.arange(2, device=device)[:, None]
keywords["position_ids"] = 2 * torch.arange(17, device=device).repeat(2, 1)
keywords["position_ids"] = torch.arange(17, device=device) * torch.tensor([[1], [3]], device=device)
keywords["position_ids"] = torch.arange(17, device=device).flip(0).repeat(2, 1) + 3
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


def test_hooks_for_all_modules_see_the_same_modules(models, tokens):
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(type(part).__name__))
    try:
        for model in models:
            model(tokens)
    finally:
        handle.remove()
    half = len(seen) // 2
    names = [name.removeprefix("Llama").replace("MLP", "SwiGLU") for name in seen]
    assert "SiLUActivation" in seen and names[:half] == names[half:]


@pytest.mark.gpu
def test_tensors_on_another_gpu_are_left_to_transformers(monkeypatch, device):
    """As those of a model that accelerate has divided among several."""
    x = torch.ones(2, 3, device=device)
    assert hugging_face.are_plain(x)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not hugging_face.are_plain(x)


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
    plain, ours = (
        llama.relative_errors(loss_and_gradients(model, tokens, autocast=torch.bfloat16), exact) for model in models
    )
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


@pytest.fixture
def launched(monkeypatch):
    """How often each of our kernels has been launched, {name: number}."""
    counts, launch = collections.Counter(), llama.launch

    def count(kernel, *args, **keywords):
        counts[kernel.fn.__name__] += 1
        return launch(kernel, *args, **keywords)

    monkeypatch.setattr(llama, "launch", count)
    return counts


# What launches the others is no question of arguments: they are launched once for each module, always.
ALWAYS = {"rmsnorm_kernel": 3, "swiglu_activation_kernel": 1}


def tensors_of(result):
    """Return all tensors and numbers in the result of a model, of a cache the keys and values."""
    if isinstance(result, (DynamicCache, StaticCache)):
        return [[layer.keys, layer.values] for layer in result.layers]
    if isinstance(result, dict):
        return {name: tensors_of(value) for name, value in result.items()}
    return [tensors_of(value) for value in result] if isinstance(result, (tuple, list)) else result


# What our attention kernel computes of a forward pass, what is left to the code of transformers: each argument of the
# models' forward() and what it passes on. Several values of one argument differ.
FORWARD = """
input_ids             | ours   | tokens
inputs_embeds         | ours   | model.get_input_embeddings()(tokens).detach()
attention_mask        | ours   | ones
attention_mask        | theirs | (torch.arange(17, device=device) > 2).long().repeat(2, 1)
attention_mask        | theirs | (torch.arange(17, device=device) < 9).long().repeat(2, 1)
attention_mask        | theirs | torch.ones(2, 1, 17, 17, device=device, dtype=torch.bool).tril(2)
position_ids          | ours   | positions
position_ids          | ours   | positions + 5
position_ids          | theirs | positions + torch.tensor([[0], [4]], device=device)
position_ids          | theirs | positions * torch.tensor([[1], [3]], device=device)
cache                 | ours   | DynamicCache()
cache                 | ours   | DynamicCache(config=model.config)
cache                 | theirs | filled_cache(model, tokens)
cache                 | theirs | StaticCache(config=model.config, max_cache_len=20)
past_key_values       | ours   | DynamicCache()
past_key_values       | theirs | filled_cache(model, tokens)
cache_position        | ours   | torch.arange(17, device=device)
use_cache             | ours   | True
use_cache             | ours   | False
labels                | ours   | tokens
logits_to_keep        | ours   | 1
logits_to_keep        | ours   | torch.tensor([3, 5], device=device)
num_items_in_batch    | ours   | torch.tensor(7, device=device)
num_items_in_batch    | ours   | 7
ignore_index          | ours   | 3
shift_labels          | ours   | tokens.flip(1)
output_hidden_states  | ours   | True
output_hidden_states  | ours   | False
output_attentions     | ours   | False
output_attentions     | theirs | True
output_router_logits  | ours   | True
return_dict           | ours   | False
is_causal             | ours   | True
is_causal             | theirs | False
cu_seq_lens_q         | theirs | torch.tensor([0, 17], device=device)
cu_seq_lens_k         | theirs | torch.tensor([0, 17], device=device)
max_length_q          | theirs | 17
max_length_k          | theirs | 17
seq_idx               | theirs | positions * 0
anything_else         | theirs | 1
"""
NAMES_OF_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}


# The same of generate(), where the first pass over the prompt is ours, and each later token is theirs.
GENERATE = """
inputs                         | ours   | tokens
inputs_embeds                  | ours   | model.get_input_embeddings()(tokens).detach()
attention_mask                 | ours   | torch.ones_like(tokens)
attention_mask                 | theirs | (torch.arange(17, device=device) > 2).long()[None]
generation_config              | ours   | transformers.GenerationConfig(max_new_tokens=2, do_sample=True)
logits_processor               | ours   | [lambda ids, scores: scores.roll(1, -1)]
stopping_criteria              | ours   | [lambda ids, scores: torch.ones(len(ids), dtype=torch.bool, device=device)]
prefix_allowed_tokens_fn       | ours   | lambda row, ids: [3, 4]
synced_gpus                    | ours   | False
assistant_model                | ours   | make_model(device, num_hidden_layers=1).eval()
streamer                       | ours   | types.SimpleNamespace(put=lambda value: None, end=lambda: None)
negative_prompt_ids            | ours   | tokens
negative_prompt_attention_mask | ours   | torch.ones_like(tokens)
custom_generate                | ours   | lambda model, ids, **given: model(ids).logits.argmax(-1)
use_cache                      | ours   | False
past_key_values                | theirs | filled_cache(model, tokens)
num_beams                      | theirs | 2
num_return_sequences           | theirs | 2
cache_implementation           | theirs | "static"
prefill_chunk_size             | ours   | 9
prompt_lookup_num_tokens       | ours   | 2
output_attentions              | theirs | True
output_scores                  | ours   | True
"""


def table(lines):
    return [[cell.strip() for cell in line.split("|", 2)] for line in lines.strip().splitlines()]


def parameters(*functions):
    return set().union(*(inspect.signature(f).parameters for f in functions)) - {
        "self",
        "kwargs",
        "logits",
        "vocab_size",
    }


Model = transformers.LlamaModel
Causal = transformers.LlamaForCausalLM
(KEYWORDS,) = inspect.signature(Model.forward).parameters["kwargs"].annotation.__args__
OF_MODEL = parameters(Model.forward) | set(KEYWORDS.__annotations__) | set(FlashAttentionKwargs.__annotations__)
OF_LOSS = parameters(hugging_face.ForCausalLMLoss) - {"labels"}
OF_FORWARD = OF_MODEL | OF_LOSS | parameters(Causal.forward)


def filled_cache(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens[:, :5], use_cache=True)[1]


def test_the_tables_have_every_argument():
    """A release that adds one has to be looked at."""
    assert OF_FORWARD <= {name for name, *_ in table(FORWARD)}
    assert parameters(Causal.generate) <= {name for name, *_ in table(GENERATE)}
    assert {*ALL_ATTENTION_FUNCTIONS, "eager"} <= set(ATTENTION)


@pytest.mark.parametrize("name, verdict, value", table(FORWARD))
def test_each_argument_is_ours_or_theirs(device, tokens, launched, name, verdict, value):
    known = {**globals(), "tokens": tokens, "device": device, "ones": torch.ones_like(tokens)}
    known["positions"] = torch.arange(17, device=device)[None]
    if name in {"cache", "cache_position", "is_causal"} - OF_FORWARD:
        pytest.skip(f"{name} is of another release")
    for part in ("model", "model.model"):
        if part == "model.model" and (name not in OF_MODEL or name in OF_LOSS):
            continue
        results = []
        for swap in (lambda model: model, hugging_face.swap_kernels):
            model = eval(part, {"model": swap(make_model(device, num_hidden_layers=1))})
            keywords = {name: eval(value, known | {"model": model})}
            if name != "inputs_embeds":
                keywords = {"input_ids": tokens} | keywords
            if name in OF_LOSS:
                keywords["labels"] = tokens
            launched.clear()
            results.append(tensors_of(model(**keywords)))
        assert_close(*results)
        attention = launched.pop("flash_attention_kernel", 0)
        assert attention == (verdict == "ours")
        assert launched.pop("rope_kernel", 0) == attention
        assert launched.pop("cross_entropy_kernel", 0) == ("labels" in keywords)
        assert launched == ALWAYS


def outcome(function, **keywords):
    """Return the tensors of what a function returns, or None if this release of transformers cannot do it."""
    try:
        with torch.no_grad():  # flex_attention has no gradients on a CPU
            return tensors_of(function(**keywords))
    except Exception:
        return None


@pytest.mark.parametrize("name, verdict, value", table(GENERATE))
def test_each_argument_of_generate_is_ours_or_theirs(device, tokens, launched, name, verdict, value):
    tokens, results = tokens[:1], []
    for swap in (lambda model: model, hugging_face.swap_kernels):
        model = swap(make_model(device, num_hidden_layers=1, initializer_range=0.3)).eval()
        keywords = {name: eval(value, globals() | dict(tokens=tokens, device=device, model=model))}
        if name not in {"inputs", "inputs_embeds"}:
            keywords["inputs"] = tokens
        if name == "num_return_sequences":
            keywords["do_sample"] = True
        if name.startswith("negative"):
            keywords |= dict(guidance_scale=1.5, negative_prompt_ids=tokens.flip(1))
        torch.manual_seed(0)
        launched.clear()
        length = {} if name == "generation_config" else dict(max_new_tokens=2)
        results.append(outcome(model.generate, **keywords, **length, pad_token_id=36, return_dict_in_generate=True))
    assert_close(*results)
    if results[0] is None:
        assert name == "prefill_chunk_size"
        pytest.skip("this release cannot do it")
    assert bool(launched["flash_attention_kernel"]) == (verdict == "ours")
    assert launched["rmsnorm_kernel"]


# Each name of attention that transformers knows, and of others: who computes one text, and packed ones.
ATTENTION = {
    "sdpa": ("ours", "theirs"),
    "flash_attention_2": ("ours", "theirs"),
    "flash_attention_3": ("ours", "theirs"),
    "flash_attention_4": ("ours", "theirs"),
    "eager": ("theirs", "theirs"),
    "flex_attention": ("theirs", "theirs"),
    "paged|eager": ("theirs", "theirs"),
    "paged|sdpa": ("theirs", "theirs"),
    "paged|flash_attention_2": ("theirs", "theirs"),
    "paged|flash_attention_3": ("theirs", "theirs"),
    "paged|flash_attention_4": ("theirs", "theirs"),
    "window": ("theirs", "theirs"),
    "hub/kernel": ("theirs", "theirs"),
}


def sees(mask, q, k, v, scaling):
    """Return attention of q, k, v (batch, heads, seq, head_dim) with a mask, as (batch, seq, heads, head_dim)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return o.transpose(1, 2)


def window(module, q, k, v, mask, scaling=None, dropout=0.0, **others):
    """Attend to the last four tokens."""
    return sees(
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().triu(-3), q, k, v, scaling
    ), None


def flash(q, k, v, mask, softmax_scale=None, position_ids=None, cu_seq_lens_q=None, **others):
    """Compute what FlashAttention does of q, k, v (batch, seq, heads, head_dim): texts of one row are kept apart."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = torch.arange(q.shape[2], device=q.device)
    if cu_seq_lens_q is not None:
        text = torch.searchsorted(cu_seq_lens_q, rows, right=True)
    elif len(q) == 1 and position_ids is not None:
        text = (position_ids[0] == position_ids.min()).cumsum(0)
    else:
        text = rows * 0
    seen = (text[:, None] == text) & (rows[:, None] >= rows)
    return sees(seen if mask is None else seen & mask[:, None, None].bool(), q, k, v, softmax_scale)


@pytest.fixture
def attentions(monkeypatch):
    """Imitate FlashAttention below what transformers registers, register two of others, and do not compile flex's."""
    for interface in AttentionInterface, AttentionMaskInterface:
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash)
    AttentionInterface.register("window", window)
    for interface in AttentionInterface, AttentionMaskInterface:
        interface.register("hub/kernel", interface._global_mapping["flash_attention_2"])
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_attention_is_ours_or_theirs(device, tokens, attentions, launched, name, texts):
    """Named before the kernels are put in, or afterwards."""
    positions = torch.cat([torch.arange(9), torch.arange(8) + (9 if texts == 1 else 0)])[None].to(device)
    theirs, ours, later = (make_model(device, num_hidden_layers=1) for _ in range(3))
    hugging_face.swap_kernels(later)
    for model in theirs, ours, later:
        model.config._attn_implementation = name
    hugging_face.swap_kernels(ours)
    keywords = dict(input_ids=tokens[:1], position_ids=positions, use_cache=False)
    expected = outcome(theirs, **keywords)
    for model in ours, later:
        launched.clear()
        assert_close(outcome(model, **keywords), expected)
        is_ours = ATTENTION[name][texts - 1] == "ours" and expected is not None
        assert launched["flash_attention_kernel"] == is_ours
    assert expected is not None or name.startswith("paged") or name not in ALL_ATTENTION_FUNCTIONS


def test_a_replaced_attention_or_mask_is_called(device, tokens, attentions, launched):
    """Also under a name of transformers."""
    models = [make_model(device), hugging_face.swap_kernels(make_model(device))]
    plain = tensors_of(models[0](tokens))
    near = torch.ones(1, 1, 17, 17, dtype=torch.bool, device=device).tril().triu(-3)
    AttentionMaskInterface.register("sdpa", lambda *args, **others: near)
    masked = [tensors_of(model(tokens)) for model in models]
    AttentionMaskInterface.register("sdpa", lambda *args, **others: None)
    AttentionInterface.register("sdpa", window)
    registered = [tensors_of(model(tokens)) for model in models]
    for results in masked, registered:
        assert_close(*results)
        assert not torch.allclose(results[0]["logits"], plain["logits"], atol=1e-3)
    assert_close(masked, registered)
    assert not launched["flash_attention_kernel"]


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_packed_texts_are_kept_apart(device, tokens, attentions, name, mode):
    """By default, where transformers has a cache, and mixes what is not for FlashAttention."""
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None].to(device)
    model = getattr(hugging_face.swap_kernels(make_model(device)), mode)()
    model.config._attn_implementation = name
    packed = model(tokens[:1], position_ids=positions).logits
    apart = [model(text).logits for text in tokens[:1].split([9, 8], dim=1)]
    assert_close(packed, torch.cat(apart, dim=1))


POSITIONS = """
dict(batch=1)                                        | ours
dict(batch=1, ids=[range(17)])                       | ours
dict(batch=1, ids=[range(5, 22)])                    | ours
dict(batch=1, ids=[[*range(9), *range(8)]])          | theirs
dict(batch=1, ids=[[*range(3, 12), *range(3, 11)]])  | theirs
dict(batch=1, ids=[[0, *range(16)]])                 | theirs
dict(batch=2, ids=[range(17)])                       | ours
dict(batch=2, ids=[range(17), range(2, 19)])         | theirs
dict(batch=2, ids=[[*range(9), *range(8)]] * 2)      | theirs
dict(batch=1, ids=[[*range(9), *range(8)]], cu=[9])  | theirs
dict(batch=1, cu=[4, 9])                             | theirs
"""


@pytest.mark.parametrize("given, verdict", [line.split("|") for line in POSITIONS.strip().splitlines()])
def test_flash_attention_reads_positions(device, tokens, attentions, launched, given, verdict):
    def keywords_of(batch, ids=None, cu=None):
        keywords = dict(input_ids=tokens[:batch], use_cache=False)
        if ids:
            keywords["position_ids"] = torch.tensor([list(row) for row in ids], device=device)
        if cu:
            ends = torch.tensor([0, *cu, 17], device=device, dtype=torch.int32)
            keywords |= dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=17, max_length_k=17)
        return keywords

    theirs, ours = make_model(device), hugging_face.swap_kernels(make_model(device))
    for model in theirs, ours:
        model.config._attn_implementation = "flash_attention_2"
    keywords = eval(given, {"dict": keywords_of, "range": range})
    assert_close(*(tensors_of(model(**keywords)) for model in (ours, theirs)))
    assert bool(launched["flash_attention_kernel"]) == (verdict.strip() == "ours")


def test_positions_are_looked_at_once_in_each_forward_pass(device, tokens, attentions, monkeypatch):
    """They may be written in place between two, and each look waits for the GPU."""
    looks, look = [], hugging_face.find_packed_sequence_indices
    monkeypatch.setattr(hugging_face, "find_packed_sequence_indices", lambda ids: looks.append(1) or look(ids))
    theirs, ours = make_model(device), hugging_face.swap_kernels(make_model(device))
    positions = torch.arange(17, device=device)[None]
    for model in theirs, ours:
        model.config._attn_implementation = "flash_attention_2"
    for number in range(1, 3):
        assert_close(*(model(tokens[:1], position_ids=positions, use_cache=False).logits for model in (ours, theirs)))
        assert len(looks) == number
        positions[0, 9:] -= 9
    ours.config._attn_implementation = "sdpa"
    ours(tokens)
    assert len(looks) == number


LOOPS = ["{}", "dict(past_key_values=None)", "dict(past_key_values=DynamicCache())", "dict(labels=piece)"]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("first", LOOPS)
def test_a_text_is_read_in_pieces(device, tokens, launched, first, mode):
    """As in a decoding loop by hand, in which the cache is passed on; gradients flow back through it."""
    results = []
    for swap in (lambda model: model, hugging_face.swap_kernels):
        model, pieces = getattr(swap(make_model(device)), mode)(), tokens.split([9, 7, 1], dim=1)
        launched.clear()
        output = model(pieces[0], **eval(first, globals() | {"piece": pieces[0]}))
        logits = [output.logits]
        for piece in pieces[1:]:
            output = model(piece, past_key_values=output.past_key_values)
            logits.append(output.logits)
        logits[-1].square().sum().backward()
        results.append([*logits, *(parameter.grad for parameter in model.parameters())])
    assert_close(*results)
    assert launched["flash_attention_kernel"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["model", "autocast"])
def test_bf16_is_not_interpreted(tokens, launched, kind, dtype):
    """The interpreter multiplies matrices of it wrongly."""
    models = [make_model(num_hidden_layers=1), hugging_face.swap_kernels(make_model(num_hidden_layers=1))]
    autocast = dtype if kind == "autocast" else None
    results = [loss_and_gradients(m if autocast else m.to(dtype), tokens[:1], autocast) for m in models]
    rounding = 0 if dtype == torch.bfloat16 else 1e-2
    torch.testing.assert_close(*results, rtol=rounding, atol=rounding)
    assert bool(launched) == (dtype == torch.float16)


def hook_as_accelerate(module):
    """Set a forward() as accelerate's hooks do: it finds the former one in an attribute."""
    module._old_forward = module.forward
    module.forward = functools.partial(lambda module, *args, **given: module._old_forward(*args, **given), module)


def unhook_as_accelerate(module):
    hook_as_accelerate(module)
    module.forward = module._old_forward
    del module._old_forward


# What others have set on each instance before the kernels are put in, and whether ours are called.
FORWARDS = """
hook_as_accelerate(module)                                                       | ours
unhook_as_accelerate(module)                                                     | ours
module.compile(backend="eager")                                                  | ours
module.forward = types.MethodType(type(module).forward, module)                  | ours
module.forward = functools.partial(module.forward)                               | named
module.forward = lambda *args, f=module.forward, **given: f(*args, **given)      | named
module.__class__ = type("Mine", (type(module),), {})                             | named
"""


@pytest.mark.parametrize("place, kernel", [
    ("input_layernorm", "rmsnorm_kernel"), ("self_attn", "flash_attention_kernel"), ("mlp", "swiglu_activation_kernel")
])  # fmt: skip
@pytest.mark.parametrize("change, verdict", [line.rsplit("|", 1) for line in FORWARDS.strip().splitlines()])
def test_a_forward_that_was_set_before_is_ours_or_named(device, tokens, launched, place, kernel, change, verdict):
    model, tokens = make_model(device), tokens[:1, :5]
    expected = model(tokens).logits
    for layer in model.model.layers:
        exec(change, globals() | {"module": getattr(layer, place)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hugging_face.swap_kernels(model)
    assert_close(model(tokens).logits, expected)
    names = [str(warning.message) for warning in caught]
    if verdict.strip() == "ours":
        assert not names and launched[kernel] == (5 if kernel == "rmsnorm_kernel" else 2)
    else:
        assert len(names) == 1 and f"model.layers.0.{place} and 1 more" in names[0]
        assert launched[kernel] == (3 if kernel == "rmsnorm_kernel" else 0)


def test_swapping_twice_is_swapping_once(models, tokens, launched):
    theirs, ours = models
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hugging_face.swap_kernels(ours) is ours
    assert len(ours.model._forward_pre_hooks) == 1
    assert_close(ours(tokens).logits, theirs(tokens).logits)


def test_a_compiled_model_is_right_and_has_a_note(device, tokens):
    theirs = make_model(device, num_hidden_layers=1)
    compiled = torch.compile(hugging_face.swap_kernels(copy.deepcopy(theirs)), backend="eager")
    with pytest.warns(UserWarning, match="call the swapped model without it"):
        logits = compiled(tokens, use_cache=False).logits
    assert_close(logits, theirs(tokens).logits)
    with pytest.raises(llama.UsageError, match="OptimizedModule.* compile it later"):
        hugging_face.swap_kernels(compiled)


def test_nothing_is_launched_on_the_meta_device(launched):
    """As accelerate makes models whose weights are still to come; some releases cannot compute there."""
    tokens = torch.zeros(1, 5, dtype=torch.long, device="meta")
    theirs, ours = make_model("meta"), hugging_face.swap_kernels(make_model("meta"))
    expected, actual = (outcome(model, input_ids=tokens, labels=tokens) for model in (theirs, ours))
    assert (actual is None) == (expected is None) and not launched
