"""Exercises about Triton kernels and about finding what makes a training step slow."""

import os
import sys

try:
    os.getcwd()
except FileNotFoundError:  # a library of PyTorch would end the process, and give another reason
    print("error: the current folder was deleted: change to another one", file=sys.stderr)
    sys.exit(2)
