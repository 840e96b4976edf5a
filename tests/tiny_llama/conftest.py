"""What several tests of the companions begin with."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_llama_v3 as llama

TINY = (
    "--hidden-dim 32 --num-layers 2 --num-heads 2 --ffn-dim 32 --vocab-size 37 --batch-size 1 --seq-len 16 "
    "--num-steps 2 --warmup-steps 1 --impl torch --device cpu"
).split()


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
