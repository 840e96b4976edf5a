"""The command line of the measurements of a replay: the options of tiny_llama_v3.py, and one file as result."""

from pathlib import Path

import torch

import tiny_llama_v3 as llama
from measure.command_line import program
from measure.results import write_json


def program_of(name, measure, needs_gpu=True):
    """Returns main() of a program that writes the result of measure(config, device) to <name>.json in --output-dir."""

    @program(f"{name}.py")
    def main(argv):
        config = llama.parse_config(argv, f"{name}.py")
        device = llama.select_device(config.device)
        if needs_gpu and device.type == "cpu":
            raise llama.UsageError(f"{name}.py needs a GPU, and --device is cpu: leave it out, or use a GPU")
        torch.set_float32_matmul_precision(config.matmul_precision)
        write_json(Path(config.output_dir, f"{name}.json"), measure(config, device))
        return 0

    return main
