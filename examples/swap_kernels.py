"""Put our kernels into a LLaMA of transformers, and compare it with transformers alone and with Liger-Kernel.

    python -m examples.swap_kernels --sizes medium            on a GPU; without --sizes, models of three sizes
    TRITON_INTERPRET=1 python -m examples.swap_kernels --tiny       on a CPU, whose times mean nothing

This runs benchmarks.steps with the rows `hf`, `hf liger` and `hf triton`: loss and gradients are checked first, then
whole training steps are timed in turns. swap_kernels() in tiny_llama/hugging_face.py puts the kernels in. The options
are those of benchmarks.steps, and so are the exit codes; the result is in triton_profiles/.
"""

import sys

if not __package__:
    print("run it from the root as python -m examples.swap_kernels", file=sys.stderr)
    sys.exit(2)

from benchmarks import steps


def main(argv):
    # What is typed comes last and wins.
    return steps.main(["--rows", "hf", "hf liger", "hf triton", "--output-dir", "triton_profiles", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
