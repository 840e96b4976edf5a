"""What several tests of the companions begin with."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama

TINY = (
    "--hidden-dim 32 --num-layers 2 --num-heads 2 --ffn-dim 32 --vocab-size 37 --batch-size 1 --seq-len 16 "
    "--num-steps 2 --warmup-steps 1 --impl torch --device cpu"
).split()


@pytest.fixture
def without_launches(monkeypatch):
    """Import a companion for Hopper, which then launches nothing, and return it with a class of tensors of a GPU."""

    class Tensor(torch.Tensor):
        is_cuda = True

        def data_ptr(self):
            return 0

        def get_device(self):
            return 0

    def imported(name):
        hopper = llama.companion(name)
        if hopper is None:
            pytest.skip("Triton is older than 3.6, or there is none")
        monkeypatch.setattr(hopper.llama, "get_gpu", lambda kind: llama.Gpu("cuda", "GPU", "sm_90", 132, 32))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(hopper, "launch", lambda *arguments, **options: None)
        return hopper, Tensor

    return imported


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run(*flags) trains a tiny model in a folder of the test; later flags win. Its output, JSON file and losses."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        capsys.readouterr()
        assert llama.main([*TINY, *flags], "tiny_llama_v3.py") == 0
        out = capsys.readouterr().out
        result = json.loads(Path(re.search(r"^Results: (.*)$", out, re.M)[1]).read_text())
        return SimpleNamespace(out=out, result=result, losses=[step["loss"] for step in result["steps"]])

    return run
