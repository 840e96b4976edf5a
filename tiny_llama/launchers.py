"""Find out whether a launcher has started this process beside others, and which of them it is.

This module imports only the standard library, as profiles are recorded without importing PyTorch.
"""

import os
from pathlib import Path
from typing import NamedTuple

# {variable with the number of a process, from 0 on: variable with their count, or "" where there is none}. A launcher
# may be started by another, as mpirun's daemons are by srun: then a process has the variables of both, and those of the
# inner one come first here.
LAUNCHERS = {
    "RANK": "WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",  # MVAPICH
    "PMI_RANK": "PMI_SIZE",  # MPICH and Intel MPI (hydra), and others that speak PMI
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",  # jsrun of LSF
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "PALS_RANKID": "",  # mpiexec of PALS, which counts the processes of a node only
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",  # srun
    "PMIX_RANK": "",
    "MPI_LOCALRANKID": "MPI_LOCALNRANKS",  # hydra's, of one node
}
MAY_BE_ALONE = "RANK", "SLURM_PROCID"  # 0 without a count: anybody's variable, and a batch script


class Process(NamedTuple):
    """One of the processes that a launcher has started."""

    number: int
    rank: str  # the variable that has it
    size: str  # the variable with the count, or ""


def is_shell_of_slurm():
    """Tell whether Slurm's variables are those of the shell that `srun --pty` or salloc has opened.

    A shell started with four tasks has their count, but what is typed there is one process. The first of those that
    srun starts from this shell inherits SLURM_PTY_PORT and has the number 0 as well; but its task has no terminal.
    """
    if "SLURM_PTY_PORT" not in os.environ or os.environ.get("SLURM_PROCID") != "0":
        return False
    try:
        stat = Path("/proc", os.environ["SLURM_TASK_PID"], "stat").read_text()
    except (KeyError, OSError):
        return True
    return stat.rpartition(")")[2].split()[4] != "0"  # the number of its terminal


def this_process():
    """Return this Process, or None if it is the only one."""
    foreign = ()
    if is_shell_of_slurm():
        # srun has set PMI's variables, unless hydra's are beside them.
        foreign = "SLURM_PROCID", "PMIX_RANK", *(["PMI_RANK"] * ("MPI_LOCALNRANKS" not in os.environ))
    is_counted, first = False, None
    for rank, size in LAUNCHERS.items():
        number, count = os.environ.get(rank, ""), os.environ.get(size, "")
        if not number.isdecimal() or rank in foreign:
            continue
        if count.isdecimal():
            if int(count) > 1:
                return Process(int(number), rank, size)
            is_counted = True
        elif int(number) and rank != "RANK":
            return Process(int(number), rank, "")
        elif rank not in MAY_BE_ALONE:
            first = first or Process(0, rank, "")
    return None if is_counted else first
