"""Put our kernels into a LLaMA of transformers, and compare it with transformers alone and with Liger-Kernel.

    python -m examples.swap_kernels                           a model of medium size, on a GPU
    TRITON_INTERPRET=1 python -m examples.swap_kernels        a tiny one on a CPU, whose times mean nothing

This runs benchmarks.steps with the rows `hf`, `hf liger` and `hf triton`: loss and gradients are checked first, then
whole training steps are timed in turns. swap_kernels() in tiny_llama/hugging_face.py puts the kernels in. The options
are those of benchmarks.steps, such as --sizes large, and so are the exit codes; the result is in triton_profiles/.
"""

import sys

if not __package__:
    print("run it from the root as python -m examples.swap_kernels", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks import steps
from measure.command_line import Failure, program


@program("swap_kernels")
def main(argv):
    device = llama.select_device("auto")
    obstacle = llama.triton_obstacle(device)
    if obstacle and not {"-h", "--help"} & {*argv}:
        raise Failure(f"our kernels cannot run: {obstacle}")
    is_given = {"--sizes", "--sweep", "--tiny"} & {*argv}
    size = [] if is_given else ["--sizes", "medium"] if device.type == "cuda" else ["--tiny"]
    rows = ["hf", "hf liger", f"hf {steps.OURS}"]
    return steps.main(["--rows", *rows, "--output-dir", "triton_profiles", *size, *argv])


if __name__ == "__main__":
    sys.exit(main())
