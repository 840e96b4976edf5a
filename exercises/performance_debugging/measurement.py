"""What the measurements of a replay share: they take the options of tiny_llama_v3.py, and leave one file."""

import sys
from pathlib import Path

import torch

import tiny_llama_v3 as llama
from measure.results import write_json
from tiny_llama_v3 import exit_code_of


def run(name, measure, needs_gpu, argv):
    program = f"{name}.py"
    config = llama.parse_config(sys.argv[1:] if argv is None else argv, program)
    device = llama.select_device(config.device)
    if needs_gpu and device.type == "cpu":
        raise llama.UsageError(f"{program} needs a GPU, and --device is cpu: leave it out, or use a GPU")
    torch.set_float32_matmul_precision(config.matmul_precision)
    write_json(Path(config.output_dir, f"{name}.json"), measure(config, device))
    return 0


def main(name, measure, needs_gpu, argv):
    """Writes what measure(config, device) returns as <name>.json into --output-dir. The exit code."""
    return exit_code_of(lambda: run(name, measure, needs_gpu, argv), f"{name}.py")
