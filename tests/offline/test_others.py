"""Verdicts on other people's kernels, with fakes: no kernel is launched."""

import json
import re
import types

import pytest
import torch

from measure.accuracy import KERNEL_TOLERANCE
from offline import others
from offline.emulator import Fault
from offline.other_kernels import Case, conch, fla, liger, registry, tutorials


def double(x, weight):
    return 2 * x * weight


def case_of(kernel=double, dtype=torch.float32, has_backward=True, plain=double):
    def build(kernel, randn):
        return kernel, plain, [randn(5, 7), randn(7)]

    case = Case("package", "package.double", "package:double", build, dtype, has_backward)
    return others.outcome_of(case, lambda: kernel, lambda: 3)


def scaled(factor, part="output"):
    """Return double() with a wrong output, or a wrong gradient of its second input."""

    def kernel(x, weight):
        if part == "output":
            return double(x, weight) + (factor - 1) * double(x, weight).detach()
        wrong = weight * factor  # its gradient; the value stays
        return double(x, (weight - wrong).detach() + wrong)

    return kernel


def raising(error):
    def kernel(*inputs):
        raise error

    return kernel


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE)
def test_a_right_kernel(dtype):
    row = case_of(dtype=dtype)
    assert (row["verdict"], row["error"], row["launches"]) == ("right", None, 3)
    assert row["dtype"] == str(dtype)[6:] and row["passes"] == "forward, backward"


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE)
@pytest.mark.parametrize("part, name", [("output", "output 1"), ("gradient", "gradient 2")])
def test_a_wrong_kernel_names_what_is_wrong_and_its_inputs(dtype, part, name):
    """Twice the error that plain PyTorch may have, and a hundredth, are seen in outputs and gradients."""
    allowed = KERNEL_TOLERANCE[dtype] + 2 * torch.finfo(dtype).eps
    assert case_of(scaled(1 + 8 * allowed, part), dtype)["verdict"] == "wrong"
    row = case_of(scaled(1.01 if dtype == torch.float32 else 1.1, part), dtype)
    assert row["verdict"] == "wrong"
    assert re.fullmatch(f"{name} of inputs 5x7, 7: error .*, allowed .*", row["error"])


@pytest.mark.parametrize("kernel", [
    lambda x, w: double(x, w)[None], lambda x, w: double(x, w).T,
    lambda x, w: double(x, w)[:1], lambda x, w: double(x, w) * float("nan"),
    lambda x, w: x.data.mul_(3),
])  # fmt: skip
def test_what_is_missing_not_a_number_or_written_over_is_not_right(kernel):
    assert case_of(kernel)["verdict"] != "right"


@pytest.mark.parametrize("kernel, name", [
    (lambda x, w: double(x, w.detach()), "gradient 2"),
    (lambda x, w: double(x, w).detach().requires_grad_(), "gradient 1"),
])  # fmt: skip
def test_an_input_that_gets_no_gradient_is_wrong(kernel, name):
    row = case_of(kernel)
    assert row["verdict"] == "wrong" and row["error"].startswith(f"{name} of inputs 5x7, 7: error inf")
    assert case_of(lambda x, w: 2 * x, plain=lambda x, w: 2 * x)["verdict"] == "right"  # as in plain PyTorch


def test_without_a_backward_pass_gradients_do_not_count():
    row = case_of(scaled(2, "gradient"), has_backward=False)
    assert (row["verdict"], row["passes"]) == ("right", "forward")
    assert case_of(lambda x, w: double(x, w).detach(), has_backward=False)["verdict"] == "right"
    assert case_of(lambda x, w: x.mul_(2 * w), has_backward=False)["verdict"] == "right"  # over its input


def test_one_more_output_than_the_reference_does_not_hide_a_wrong_one():
    assert case_of(lambda x, w: (double(x, w), x), has_backward=False)["verdict"] == "right"
    assert case_of(lambda x, w: (x, double(x, w)), has_backward=False)["verdict"] == "wrong"
    pair = case_of(plain=lambda x, w: (double(x, w), x + w), has_backward=False)
    assert pair["verdict"] == "wrong" and pair["error"].startswith("output 2")


@pytest.mark.parametrize("error, verdict, reason", [
    (Fault("a.py:9: k on gfx942 touches 0 bytes after the end of x"), "fault", "a.py:9: k on gfx942 touches 0 bytes"),
    (NotImplementedError("v_x is not emulated\nmore"), "not runnable", "NotImplementedError: v_x is not emulated"),
    (AssertionError("Torch not compiled"), "not runnable", "AssertionError: Torch not compiled"),
])  # fmt: skip
def test_an_error_is_told_with_its_first_line(error, verdict, reason):
    row = case_of(raising(error))
    assert row["verdict"] == verdict and row["error"].startswith(reason) and "more" not in row["error"]
    assert row["seconds"] >= 0


def test_a_kernel_that_cannot_be_imported_is_not_runnable():
    case = Case("p", "p.k", "p:k", None, torch.float32, True)
    row = others.outcome_of(case, lambda: tutorials.find_kernel("no_such_package:k", None), lambda: 0)
    assert row["verdict"] == "not runnable" and "no_such_package" in row["error"]


def test_without_a_launch_there_is_nothing_to_judge():
    case = Case("p", "p.k", "p:k", lambda k, randn: (k, double, [randn(5, 7), randn(7)]), torch.float32, True)
    row = others.outcome_of(case, lambda: double, lambda: 0)
    assert (row["verdict"], row["error"]) == ("not runnable", "it launches no Triton kernel")


# ----------------------------------------------------------------------------------------------------------------------
# The cases, and which of them run


def test_cases_are_registered_by_package_and_kernel():
    cases, case = registry()
    case("some.module:Function.apply", torch.bfloat16)(case("05-layer.py:Norm.apply", has_backward=False)(double))
    assert list(cases) == ["tutorials.Norm", "some.Function"]
    assert cases["some.Function"][3:] == (double, torch.bfloat16, True)
    assert not cases["tutorials.Norm"].has_backward and cases["tutorials.Norm"].place == "05-layer.py:Norm.apply"


@pytest.mark.parametrize("name", others.CASES)
def test_a_reference_is_differentiable_and_takes_higher_precision(name):
    """Beside itself as the kernel, a plain function is right; what a case learns from its kernel is left out."""
    case = others.CASES[name]
    if name in ("tutorials.seeded_dropout", "conch.scaled_fp8_quant"):
        return

    def build(kernel, randn):
        _, plain, inputs = case.build(kernel, randn)
        return plain, plain, inputs

    row = others.outcome_of(case._replace(build=build), lambda: None, lambda: 1)
    assert (row["verdict"], row["error"]) == ("right", None)


def test_every_package_has_cases():
    parts = liger, fla, conch, tutorials
    assert sum(len(part.CASES) for part in parts) == len(others.CASES) >= 40
    assert all(len({case.package for case in part.CASES.values()}) == 1 for part in parts)


@pytest.fixture
def options(monkeypatch):
    present = {"liger_kernel"}
    monkeypatch.setattr(others.importlib.util, "find_spec", lambda name: name in present or None)
    return types.SimpleNamespace(only=[], tutorials=None)


def test_packages_that_are_missing_are_left_out_and_named(options, capsys):
    assert others.chosen_cases(options) == list(liger.CASES)
    told = capsys.readouterr().out.splitlines()
    assert told == ["fla: left out, it is not installed", "conch: left out, it is not installed",
                    "tutorials: left out, give --tutorials"]  # fmt: skip
    options.tutorials = "folder"
    assert others.chosen_cases(options) == [*liger.CASES, *tutorials.CASES]


def test_only(options, capsys):
    options.only = ["liger_kernel.LigerDyTFunction", "conch"]
    assert others.chosen_cases(options) == ["liger_kernel.LigerDyTFunction"]
    assert capsys.readouterr().out.splitlines() == ["conch: left out, it is not installed"]
    options.only = ["liger_kernel", "conch.rms_norm"]
    assert others.chosen_cases(options) == list(liger.CASES)


@pytest.mark.parametrize("arguments, told", [
    (["--only", "conch.rms"], "--only conch.rms: no such case or package: choose from conch, conch.fused_add_rms_norm"),
    (["--only", "conch"], "no case can run: install one of the packages, or give --tutorials"),
    (["--tutorials", "."], "--tutorials . holds no tutorials: give python/tutorials of a checkout"),
])  # fmt: skip
def test_a_request_that_cannot_be_met_is_one_line(arguments, told, options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert others.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


ROWS = [
    {"kernel": "a.one", "verdict": "right", "error": None, "seconds": 1.25},
    {"kernel": "a.two", "verdict": "not runnable", "error": "TypeError: no", "seconds": 0.1},
]


def test_the_table():
    lines = others.table([{"arch": "gfx942"} | row for row in ROWS])
    assert [line.split() for line in lines[:3]] == [
        ["kernel", "GPU", "verdict", "s"], ["a.one", "gfx942", "right", "1.2"],
        ["a.two", "gfx942", "not", "runnable", "0.10"],
    ]  # fmt: skip
    assert lines[3:] == ["a.two on gfx942: TypeError: no"]


@pytest.mark.parametrize("verdict, code", [("right", 0), ("not runnable", 0), ("wrong", 1), ("fault", 1)])
def test_a_run_writes_its_rows_and_its_exit_code_tells_what_is_wrong(
    verdict, code, options, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(others.source, "prepare", lambda tinygrad: None)
    monkeypatch.setattr(others, "environment", dict)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    seen = []

    def rows_of(arch, names, options):
        seen.append((arch, names, options.seed))
        yield {"arch": arch} | ROWS[0] | {"verdict": verdict}

    monkeypatch.setattr(others, "rows_of", rows_of)
    flags = ["--only", "liger_kernel.LigerDyTFunction", "--seed", "5", "--tinygrad", "/private/tinygrad"]
    assert others.main([*flags, "--output-dir", str(tmp_path)]) == code
    assert seen == [(arch, ["liger_kernel.LigerDyTFunction"], 5) for arch in ("gfx942", "gfx950")]
    (file,) = tmp_path.glob("others_*.json")
    result = json.loads(file.read_text())
    assert [row["arch"] for row in result["rows"]] == ["gfx942", "gfx950"]
    chosen = "--architectures gfx942 gfx950 --seed 5 --only liger_kernel.LigerDyTFunction"
    assert result["command"] == f"python -m offline.others {chosen}"
    assert result["environment"]["torch"] and "private" not in file.read_text() and str(file) in capsys.readouterr().out


class Pool:
    """A pool of one process that runs at once; the second case ends it."""

    started = 0

    def __init__(self, *arguments):
        type(self).started += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, arch, name, *rest):
        def result():
            if name.endswith("Loss"):
                raise others.BrokenProcessPool
            return {"kernel": name, "verdict": "right", "error": None}

        return types.SimpleNamespace(result=result)


def test_a_case_that_ends_its_process_does_not_end_the_others(monkeypatch):
    monkeypatch.setattr(others.concurrent.futures, "ProcessPoolExecutor", Pool)
    names = ["liger_kernel.LigerDyTFunction", "liger_kernel.GrpoLoss", "liger_kernel.LigerRopeFunction"]
    monkeypatch.setitem(others.CASES, names[1], others.CASES[names[0]]._replace(name=names[1]))
    options = types.SimpleNamespace(tinygrad=None, seed=1, tutorials=None)
    rows = list(others.rows_of("gfx942", names, options))
    assert [row["kernel"] for row in rows] == names and {row["arch"] for row in rows} == {"gfx942"}
    assert [row["verdict"] for row in rows] == ["right", "not runnable", "right"] and Pool.started == 2
    assert rows[1]["error"] == "it ended the process"


# ----------------------------------------------------------------------------------------------------------------------
# Tutorials

TUTORIAL = '''
"""A tutorial."""
import math
import no_such_module
from os import path as folder

SIZE = 3
unused = SIZE / 0
late = missing = None
if SIZE > 2:
    LIMIT = math.prod([SIZE, 5])
raise RuntimeError("bare statements are not run")


def bench():
    pass


class Norm:
    size = SIZE

    def scale(self):
        return LIMIT * self.size


@bench.perf_report(SIZE)
def benchmark():
    return unused


result = Norm().scale() / 0
bench.run(result)


def use(x):
    return no_such_module.f(x)
'''


def test_a_tutorial_is_loaded_without_what_it_runs(tmp_path):
    (tmp_path / "01-a.py").write_text(TUTORIAL)
    assert tutorials.find_kernel("01-a.py:Norm", tmp_path)().scale() == 45
    assert tutorials.find_kernel("01-a.py:Norm.size", tmp_path) == 3
    module = tutorials.load(tmp_path / "01-a.py")
    assert not {"benchmark", "result", "unused", "folder"} & module.__dict__.keys()
    with pytest.raises(NameError, match="no_such_module"):
        module.use(1)


def test_a_definition_that_fails_is_told(tmp_path):
    (tmp_path / "01-a.py").write_text("@missing\ndef kernel():\n    pass\n")
    with pytest.raises(NameError, match="missing"):
        tutorials.find_kernel("01-a.py:kernel", tmp_path)


def test_the_version_of_the_tutorials(tmp_path):
    assert tutorials.version(None) == tutorials.version(tmp_path / "tutorials") == {}
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.7.0'\n")
    assert tutorials.version(str(tmp_path / "tutorials")) == {"tutorials": "3.7.0"}
