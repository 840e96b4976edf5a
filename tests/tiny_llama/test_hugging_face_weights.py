"""Every weight of our model has its place in Hugging Face's, and comes back from there; transformers is not needed."""

import importlib
import sys
import types

import pytest
import torch

import tiny_llama_v3 as llama
from measure.work import SIZES
from tiny_llama import hugging_face_weights
from tiny_llama.hugging_face_weights import copy_to_hugging_face, from_hugging_face, hf_names

CONFIG = llama.Config(**SIZES["tiny"])


@pytest.fixture
def ours():
    model = llama.TinyLlamaTriton(CONFIG, llama.OPERATIONS["torch"])
    return {name: torch.rand_like(weight) for name, weight in model.named_parameters()}


def test_names_cover_the_model(ours):
    theirs = sum(map(hf_names, ours), [])
    assert len(set(theirs)) == len(theirs) == 2 + 9 * CONFIG.num_layers
    assert "model.layers.1.self_attn.k_proj.weight" in theirs and "model.norm.weight" in theirs


def test_weights_that_were_copied_come_back(ours):
    theirs = {}
    for name, weight in ours.items():
        sizes = [*range(1, len(hf_names(name))), -1]  # unlike ones, as of queries and keys
        sizes[-1] = len(weight) - sum(sizes[:-1])
        theirs |= {part: torch.zeros(size, *weight.shape[1:]) for part, size in zip(hf_names(name), sizes, strict=True)}
    model = types.SimpleNamespace(named_parameters=theirs.items)
    copy_to_hugging_face(ours, model)
    back = from_hugging_face(theirs, ours)
    assert list(back) == list(ours) and all(back[name].equal(weight) for name, weight in ours.items())
    theirs["lm_head.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="no counterpart of lm_head.weight"):
        copy_to_hugging_face(ours, model)
    with pytest.raises(KeyError, match="lm_head.weight"):
        from_hugging_face({}, ["lm_head.weight"])


def test_transformers_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises an error
    importlib.reload(hugging_face_weights)
