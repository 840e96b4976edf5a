"""What judges the exercises: a module an exercise, whose TASKS are {name of the task: its check}.

A check takes the participant's module, and raises common.Wrong with the reason.
"""

import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
