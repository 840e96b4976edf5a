"""Run other people's Triton kernels on emulated AMD GPUs, and compare their results with plain PyTorch.

    python -m offline.others                                  those of the installed packages, on gfx942 and gfx950
    python -m offline.others --only liger_kernel fla_hgrn     of a package, or by name
    python -m offline.others --tutorials triton/python/tutorials

Each case is a small forward pass, and a backward pass where there is one. It is right if its errors obey the rule of
measure/accuracy.py, wrong if they do not, at fault if the emulator found an invalid access or a result that depends on
the order of waves or on what nobody has written, and not runnable if it raised an error. The packages must be in the
interpreter's path; what is not installed is left out. docs/emulator.md has the table.

Exit codes: 0 done, 1 a kernel is wrong or at fault, 2 the request cannot be met, 130 interrupted.
"""

import concurrent.futures
import functools
import importlib.util
import multiprocessing
import os
import random
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if not __package__:
    print("run it from the root as python -m offline.others", file=sys.stderr)
    sys.exit(2)

import torch

import tiny_llama_v3 as llama
from measure.accuracy import KERNEL_TOLERANCE, compare, promoted
from measure.command_line import Parser, UsageError, program
from measure.device import require_triton
from measure.results import RESULTS, ResultFile, Unavailable, describe, header, versions
from measure.tables import number, text_table
from offline.emulate import ARCHITECTURES, environment
from offline.emulator import Fault, source
from offline.other_kernels import TUTORIALS, conch, fla, liger, tutorials

CASES = liger.CASES | fla.CASES | conch.CASES | tutorials.CASES
RIGHT, WRONG, FAULT, NOT_RUNNABLE = "right", "wrong", "fault", "not runnable"

# ----------------------------------------------------------------------------------------------------------------------
# One case


def seeded_randn(seed):
    """Return torch.randn with a generator of its own."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def results_of(function, inputs, case):
    """Return the outputs of a function, and the gradients of its inputs if the case has any: {name: tensor}."""
    leaves = [x.detach().clone().requires_grad_(case.has_backward) for x in inputs]  # a kernel may overwrite them
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    results = {f"output {number}": output.detach().clone() for number, output in enumerate(outputs, 1)}
    if case.has_backward:
        randn = seeded_randn(1)
        torch.autograd.backward(outputs, [randn(x.shape).to(case.dtype).to(x.dtype) for x in outputs])
        results |= {f"gradient {number}": x.grad for number, x in enumerate(leaves, 1) if x.grad is not None}
    return results


def verdict_of(case, kernel):
    """Return (the llama.Verdict on a kernel, a text with the shapes of its inputs)."""
    function, plain, inputs = case.build(kernel, seeded_randn(0))
    inputs = [x.to(case.dtype) for x in inputs]
    ours, same, exact = (
        results_of(f, x, case) for f, x in ((function, inputs), (plain, inputs), (plain, promoted(inputs)))
    )
    # What is missing, or has another shape, has an infinite error.
    ours = {name: ours.get(name) if ours.get(name, x[None]).shape == x.shape else None for name, x in exact.items()}
    shapes = ", ".join("x".join(map(str, x.shape)) or "1" for x in inputs)
    return compare(ours, same, exact, KERNEL_TOLERANCE[case.dtype]), shapes


def row_of(case, **outcome):
    """Return the row of a case in the result."""
    return {
        "kernel": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "passes": "forward, backward" if case.has_backward else "forward",
        **outcome,
    }


def outcome_of(case, find_kernel, count_launches):
    """Return the row of a case: its verdict, the reason if it is not right, its launches and its seconds.

    find_kernel: function that returns the kernel, or raises what importing it raises. count_launches: function that
    returns how many launches there were until now.
    """
    start, reason = time.perf_counter(), None
    try:
        verdict, shapes = verdict_of(case, find_kernel())
        if not count_launches():  # as where a package takes PyTorch for tensors of the CPU
            raise Unavailable("it launches no Triton kernel")
        errors, allowed, worst = verdict.errors, verdict.allowed, verdict.worst
        outcome = WRONG if verdict.failed else RIGHT
        if verdict.failed:
            reason = f"{worst} of inputs {shapes}: error {errors[worst]:.1e}, allowed {allowed[worst]:.1e}"
    except Fault as error:
        outcome, reason = FAULT, str(error)
    except Exception as error:  # anything that a package, its compiler or the emulator raises
        outcome, reason = NOT_RUNNABLE, describe(error)
    seconds = round(time.perf_counter() - start, 2)
    return row_of(case, verdict=outcome, error=reason, launches=count_launches(), seconds=seconds)


# ----------------------------------------------------------------------------------------------------------------------
# All of an architecture, in a process of its own: packages ask for the GPU while they are imported


def prepare(tinygrad):
    """Make a new process ready to emulate. What nobody writes is NaN, as PyTorch fills it in deterministic mode."""
    source.activate(tinygrad)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)


def emulate(arch, name, seed, folder):
    """Return the row of a case on an emulated GPU. folder: that of the tutorials."""
    from offline.emulator.driver import emulating  # needs tinygrad
    from offline.emulator.machine import Machine

    case = CASES[name]
    with emulating(Machine(arch, f"{seed} {name}", is_thorough=True)) as machine:
        find_kernel = functools.partial(tutorials.find_kernel, case.place, folder)
        return outcome_of(case, find_kernel, lambda: machine.n_launches)


def rows_of(arch, names, options):
    """Yield the row of each case. If one ends the process, the others run in a new one."""
    names = list(names)
    while names:
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), prepare, (options.tinygrad,)
        ) as pool:
            try:
                while names:
                    running = pool.submit(emulate, arch, names[0], options.seed, options.tutorials)
                    row = running.result()
                    yield {"arch": arch} | row
                    names.pop(0)
            except BrokenProcessPool:
                ended = {"verdict": NOT_RUNNABLE, "error": "it ended the process", "launches": None, "seconds": None}
                yield {"arch": arch} | row_of(CASES[names.pop(0)], **ended)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def chosen_cases(options):
    """Return the names of the cases that can run, and print what is left out; UsageError if none can."""
    known = CASES.keys() | {case.package for case in CASES.values()}
    if unknown := set(options.only) - known:
        raise UsageError(f"--only {min(unknown)}: no such case or package: choose from {', '.join(sorted(known))}")
    chosen = {name: c for name, c in CASES.items() if not options.only or {name, c.package} & {*options.only}}
    for package in dict.fromkeys(case.package for case in chosen.values()):
        is_tutorial = package == TUTORIALS
        if is_tutorial and not options.tutorials or not is_tutorial and not importlib.util.find_spec(package):
            remedy = "give --tutorials" if is_tutorial else "it is not installed"
            print(f"{package}: left out, {remedy}", flush=True)
            chosen = {name: case for name, case in chosen.items() if case.package != package}
    if not chosen:
        raise UsageError("no case can run: install one of the packages, or give --tutorials")
    return list(chosen)


def table(rows):
    """Return the lines of a table, and below it the reasons of what is not right."""
    cells = [[row["kernel"], row["arch"], row["verdict"], number(row["seconds"], 2)] for row in rows]
    reasons = [f"{row['kernel']} on {row['arch']}: {row['error']}" for row in rows if row["error"]]
    return [*text_table(["kernel", "GPU", "verdict", "s"], cells), *reasons]


@program("others.py")
def main(argv):
    parser = Parser("others.py", __doc__)
    add = parser.add_argument
    add(
        "--architectures", nargs="+", choices=ARCHITECTURES, default=["gfx942", "gfx950"], help="(default: %(default)s)"
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="cases, or packages (default: all)")
    add("--tutorials", metavar="DIR", help="python/tutorials of a checkout of Triton")
    add("--tinygrad", metavar="DIR", help=f"a copy at {source.COMMIT[:12]} (default: fetched by git)")
    add("--seed", type=int, default=random.randrange(10**6), help="of the order of waves (default: random)")
    add("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    require_triton()
    if options.tutorials and not any(Path(options.tutorials).glob("*.py")):
        raise UsageError(f"--tutorials {options.tutorials} holds no tutorials: give python/tutorials of a checkout")
    names = chosen_cases(options)
    try:
        source.prepare(options.tinygrad)
    except source.NoSource as error:
        raise UsageError(str(error)) from None
    folder = llama.writable_folder("--output-dir", options.output_dir)
    # Of the processes to come. Triton multiplies fp32 as TF32 where a chip can, plain PyTorch does not.
    os.environ |= environment() | {"TRITON_F32_DEFAULT": "ieee"}
    # Without private paths, and with the seed that repeats it.
    command = ["--architectures", *options.architectures, "--seed", str(options.seed)]
    command += (["--only", *options.only] if options.only else []) + ["--tutorials", "DIR"] * bool(options.tutorials)
    packages = {CASES[name].package for name in names}
    result = header("others", torch.device("cpu"), command, "offline") | {
        "packages": versions(*packages) | tutorials.version(options.tutorials),
        "rows": [],
    }
    file = ResultFile(folder, result)
    for arch in options.architectures:
        for row in rows_of(arch, names, options):
            result["rows"].append(row)
            print(f"{row['kernel']} on {arch}: {row['verdict']}", flush=True)
            file.save(result)
    print("", *table(result["rows"]), f"Results: {file.path}", sep="\n")
    return int(any(row["verdict"] in (WRONG, FAULT) for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
