# PYTHON and TORCH_INDEX count when .venv is made; `make clean` first to change them.
# Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA libraries.

PYTHON ?= python3
# AMD GPUs need PyTorch's ROCm wheels; empty means pip's own index.
TORCH_INDEX ?= $(if $(wildcard /dev/kfd),https://download.pytorch.org/whl/rocm6.4)
VENV_PYTHON := .venv/bin/python

.PHONY: help run test lint kernel-report clean force

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

run: .venv/run.stamp ## train for 20 steps; ARGS="--num-steps 50" adds options
	$(VENV_PYTHON) tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20 $(ARGS)

test: .venv/dev.stamp ## run the tests; PYTEST_ARGS="-k name" adds options
	$(VENV_PYTHON) -m pytest -n auto --maxprocesses 4 $(PYTEST_ARGS)

lint: .venv/dev.stamp ## check the Python and shell code
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	find . -name .venv -prune -o \( -name '*.sh' -o -path ./.ci/run \) -exec .venv/bin/shellcheck {} +

kernel-report: .venv/run.stamp ## compile every kernel for five GPU architectures into docs/compiled_kernels.md
	$(VENV_PYTHON) -m profiling.kernel_report

clean: ## remove .venv and the caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A .venv that lost its interpreter or its packages is made anew, whatever its stamps say.
healthy := $(shell $(VENV_PYTHON) -c 'from importlib.util import find_spec; \
	print(all(map(find_spec, ["pip", "torch", "numpy"])))' 2>/dev/null)

.venv/run.stamp: requirements.txt setup_env.sh $(if $(filter True,$(healthy)),,force)
	PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' ./setup_env.sh
	touch $@

# Reinstalled even where inherited: ruff and shellcheck must lie in .venv/bin.
.venv/dev.stamp: .venv/run.stamp requirements-dev.txt
	$(VENV_PYTHON) -m pip install --force-reinstall -c .venv/constraints.txt -r requirements-dev.txt
	touch $@
