# PYTHON and TORCH_INDEX count when .venv is made; `make clean` first to change them.
# Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA libraries.

PYTHON ?= python3
# The tests' scripts would run PYTHON instead of .venv's, whose parent it is.
unexport PYTHON
# Packages go into .venv, wherever others are to go.
export PIP_USER = 0
unexport PIP_TARGET PIP_PREFIX PIP_ROOT
# What is typed behind make only; not what the environment calls so.
ARGS =
PYTEST_ARGS =
ARCH =
TINYGRAD =
VENV_PYTHON := .venv/bin/python

.PHONY: help run test affected test-slow test-all emulate lint publish notebooks slides kernel-report clean force

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

run: .venv/run.stamp ## train for 20 steps; ARGS="--num-steps 50" adds options
	$(VENV_PYTHON) tiny_llama_v3.py --data markov --batch-size 8 --seq-len 128 --num-steps 20 $(ARGS)
	@echo 'To go on: . .venv/bin/activate && python tiny_llama_v3.py --help'

# A file's tests run in order in one process: they share fixtures that take a minute, and a page's blocks go on from the
# ones before.
PYTEST := $(VENV_PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile

test: .venv/dev.stamp ## run the tests that a change must pass; PYTEST_ARGS="-k name" adds options
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

affected: .venv/dev.stamp ## run the tests that what changed since SINCE (default: the last commit) can break
	tests=$$($(VENV_PYTHON) tests/affected.py $(SINCE)) && $(PYTEST) -m "not slow" $(PYTEST_ARGS) $$tests

test-slow: .venv/dev.stamp ## run the other tests
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: test test-slow ## run all tests, compile the kernels in every case, and run them on an emulated GPU, which needs clang
	$(VENV_PYTHON) -m offline.pages --check
	$(MAKE) emulate ARCH=gfx942

# TINYGRAD: a copy of the emulator's commit, for a machine without a network.
emulate: .venv/dev.stamp ## run the kernels' tests on emulated AMD GPUs; ARCH=gfx942 on one
	$(VENV_PYTHON) -m offline.emulate $(if $(ARCH),--architectures $(ARCH)) \
		$(if $(TINYGRAD),--tinygrad '$(TINYGRAD)') -- $(PYTEST_ARGS)

lint: .venv/dev.stamp ## check the Python and shell code
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	find . \( -name '.venv*' -o -name .emulator -o -name .compilers \) -prune -o \( -name '*.sh' -o -name '*.slurm' -o -path ./.ci/run \) -exec .venv/bin/shellcheck {} +

publish: .venv/run.stamp ## write the measured tables and pictures of the pages from benchmarks/results/
	$(VENV_PYTHON) -m benchmarks.pages.publish

notebooks: .venv/dev.stamp ## write the exercises' notebooks from their pages, stubs and checks
	$(VENV_PYTHON) -m exercises.generate

kernel-report: .venv/run.stamp ## compile every kernel for GPUs that need not be here, into a page of docs/
	$(VENV_PYTHON) -m offline.pages

# Marp needs node, and for the PDF a browser (Chrome, Chromium, Edge or Firefox).
MARP := npx --yes @marp-team/marp-cli@4.5.1 --no-stdin --allow-local-files docs/slides.md
slides: ## make build/slides.html and build/slides.pdf of docs/slides.md, by Marp, which needs node
	@command -v npx >/dev/null || { echo 'make slides: there is no npx: install node, or open docs/slides.md in an editor with Marp' >&2; exit 1; }
	$(MARP) --output build/slides.html
	$(MARP) --output build/slides.pdf

clean: ## remove .venv, the caches, the emulator, other Tritons and what pip built
	rm -rf .venv .emulator .compilers .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# A .venv that was moved, or lost its interpreter or packages, is made anew, whatever its stamps say.
healthy := $(shell $(VENV_PYTHON) -c 'import sys; from importlib.util import find_spec; from pathlib import Path; \
	here = Path(sys.prefix).as_uri() in Path(sys.prefix, "pip.conf").read_text(); \
	print(here and all(map(find_spec, ["pip", "torch", "numpy"])))' 2>/dev/null)

.venv/run.stamp: requirements.txt site/setup_env.sh $(if $(filter True,$(healthy)),,force)
	PYTHON='$(PYTHON)' site/setup_env.sh
	touch $@

# Reinstalled even where inherited: ruff and shellcheck must lie in .venv/bin.
.venv/dev.stamp: .venv/run.stamp tests/requirements.txt
	$(VENV_PYTHON) -m pip install $(if $(wildcard .venv/bin/ruff),,--force-reinstall) -c .venv/constraints.txt \
		-r tests/requirements.txt
	touch $@
