"""Know what others found wrong or slow in combinations of GPU, ROCm and Triton. Needs only the standard library.

Who meets another one adds it to KNOWN_BAD, with the report that has the evidence.
"""

import json
from pathlib import Path
from typing import NamedTuple

from profilers.rocm import dotted, release_in

COMPILERS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "compilers.json"


class Stack(NamedTuple):
    """A combination, and what is bad about it; it is met by one of the ROCm or of the Triton releases."""

    architectures: tuple
    rocm: tuple
    triton: tuple
    what: str  # who is hit, and what they see
    remedy: str
    link: str


KNOWN_BAD = (
    # The code that Triton 3.6.0, 3.7.1 and 3.8.0 generate has this barrier; that of 3.9.0 waits before it.
    Stack(
        ("gfx942",),
        (),
        ((3, 6), (3, 7), (3, 8)),
        "products of other kernels in fp32 with tiles of 128 x 128 x 64, 8 warps and 2 stages are wrong in every run, "
        "as a barrier does not wait for reads of LDS. torch.compile's max-autotune tries this tile. The kernels here "
        "have 1 stage and are not hit",
        "set TRITON_HIP_USE_BLOCK_PINGPONG=0, or use a Triton with pull request 11765, such as 3.9",
        "https://github.com/triton-lang/triton/issues/11696",
    ),
    Stack(
        ("gfx950",),
        (),
        ((3, 7),),
        "AMD's build crashes while it compiles other kernels with several stages, attention among them, and some "
        "pipelined products are wrong. The kernels here have 1 stage",
        "give such kernels num_stages=1",
        "https://github.com/ROCm/aiter/pull/4163",
    ),
    Stack(
        ("gfx950",),
        (),
        ((3, 8),),
        "split-K products of other kernels in 16 bits, with tiles of 16 x 16 x 256, 8 warps and 2 stages, differ from "
        "run to run. The kernels here have 1 stage",
        "give such a product another tile, and compare two runs bit by bit",
        "https://github.com/ROCm/aiter/pull/5428",
    ),
    Stack(
        ("gfx950",),
        ((10, 0),),
        (),
        "PyTorch's own attention (SDPA) chooses a slow backward kernel of AOTriton 0.13, and models train 9 to 25 % "
        "slower with it. It is a weak peer of the kernels here",
        "say so beside a comparison with SDPA, or build PyTorch with AOTriton 0.11.2",
        "https://github.com/ROCm/TheRock/issues/7696",
    ),
)


def known_bad(architectures, rocm, triton):
    """Yield (the releases in words, the Stack) of what these GPUs meet with these releases, each a tuple or None."""
    for stack in KNOWN_BAD:
        if shared := sorted({*architectures} & {*stack.architectures}):
            names = [f"ROCm {dotted(rocm)}"] if rocm in stack.rocm else []
            names += [f"Triton {dotted(triton)}"] if triton in stack.triton else []
            if names:
                yield f"{' and '.join(names)} on {', '.join(shared)}", stack


def costs(architectures, triton):
    """Yield (a sentence, whether half is lost) of each GPU on which this Triton, a tuple or None, costs occupancy."""
    if not COMPILERS.exists():  # results may have been taken away
        return
    for part in json.loads(COMPILERS.read_text())["summary"]:
        if part["arch"] in architectures and release_in(part["version"]) == triton and part["worst"]:
            yield cost_of(part)


def cost_of(part):
    """Return what costs() yields for a part of the summary of compilers.json."""
    worst, version, newest = part["worst"], part["version"], part["newest"]
    there, best = ((worst["compiled"][name] or {}).get("occupancy", 0) for name in (version, newest))
    sentence = (
        f"Triton {version} on {part['arch']}: {part['lower']} of {part['launches']} launches have less occupancy than "
        f"with {newest}, the most {worst['kernel']} ({worst['precision']}; {worst['tile']}), "
        f"{100 * there:.3g} % instead of {100 * best:.3g} %"
    )
    return sentence, there <= best / 2
