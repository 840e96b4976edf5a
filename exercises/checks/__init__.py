"""What judges the exercises: a module an exercise, whose TASKS are {name of the task: common.Task}.

A check launches the participant's functions and compares what they give. It says what is wrong, not why: the mistakes
of exercises/mistakes/ are edits of the solution, and the one that gives the same is told.
"""

import os

import torch

# With TRITON_INTERPRET=1 the kernels are interpreted, on tensors of the CPU, also where there is a GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
DEVICE = "cuda" if ON_GPU else "cpu"
