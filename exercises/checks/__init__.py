"""What judges the exercises: a module an exercise, whose TASKS are {name of the task: its check}.

A check takes the participant's module, and raises common.Wrong with the reason. A task is called like the function that
it asks for. COMPILED names the tasks that are checked a second time where there is a GPU; left out, all are. POISON
is what a masked load without `other` gives in the interpreter; left out, common.POISON.
"""

import os

import torch

# With TRITON_INTERPRET=1 the kernels are interpreted, on tensors of the CPU, also where there is a GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
