# Everything a person types here. The environment is made on first use and again when its requirements change.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# How many `auto` is for cores and memory says tests/conftest.py.
WORKERS := -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder
# The lowest releases of torch and transformers that are supported have an environment of their own.
COMPAT := .venv-compat
SOURCES := dropforge curation trainer plugins dags tests bench

.DEFAULT_GOAL := help
.PHONY: help install demo up down doctor test test-fast test-exact test-compat test-gpu test-chaos test-cluster e2e lint format lock bench clean

help:  ## List the commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## Make the project's environment in .venv
$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $$($(PYTHON) --version) is not supported. Install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make environments. Install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time, PyTorch is large"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$$(sed -n 's/^uv==//p' requirements/uv.txt)
	@$(BIN)/uv pip install --python $(BIN)/python --quiet $(addprefix --find-links=,$(PIP_FIND_LINKS)) -r requirements/dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps $(addprefix --find-links=,$(PIP_FIND_LINKS)) -e .
	@touch $@

demo: $(READY)  ## Start everything, drop sample data, follow the run to the registered model (ARGS=--exit to stop after)
	@$(BIN)/dropforge demo $(ARGS)

up: $(READY)  ## Start the stack and keep it in the foreground
	@$(BIN)/dropforge up $(ARGS)

down: $(READY)  ## Stop a stack that was left behind
	@$(BIN)/dropforge down $(ARGS)

doctor: $(READY)  ## Check this machine
	@$(BIN)/dropforge doctor $(ARGS)

test: $(READY)  ## Run all tests that need no cluster
	@$(BIN)/pytest $(WORKERS) -m "not cluster and not exact and not chaos and not gpu" $(ARGS)

test-fast: $(READY)  ## Run the tests that start neither the stack nor several training processes
	@$(BIN)/pytest $(WORKERS) -m "not cluster and not e2e and not dist and not exact and not chaos" $(ARGS)

test-exact: $(READY)  ## Run the whole matrix of exactness, of which `make test` runs a part
	@$(BIN)/pytest $(WORKERS) -m exact $(ARGS)

test-chaos: $(READY)  ## Put a training of two ranks through thirty faults, one after another
	@$(BIN)/pytest -n0 -m chaos $(ARGS)

# One process: several would share the GPUs, and what is compared to the bit would wait for memory.
test-gpu: $(READY)  ## Run the matrix, parity, resume, precision and export over NCCL on the GPUs of this machine
	@DROPFORGE_RANKS_ON=cuda $(BIN)/pytest -n0 -m "(dist and (exact or compat)) or gpu" \
	  tests/trainer/test_ranks_*.py tests/trainer/test_gpu.py $(ARGS)

test-compat: $(COMPAT)/.ready  ## Run parity, resume and the checks at start on the lowest and the newest torch
	@$(COMPAT)/bin/pytest $(WORKERS) -m compat tests/trainer $(ARGS)
	@$(BIN)/pytest $(WORKERS) -m compat tests/trainer $(ARGS)
$(COMPAT)/.ready: requirements/compat-2.11.txt pyproject.toml $(READY)
	@echo "Installing into $(COMPAT): another PyTorch, 5 GB"
	@test -x $(COMPAT)/bin/python || $(BIN)/python -m venv $(COMPAT)
	@$(BIN)/uv pip install --python $(COMPAT)/bin/python --quiet $(addprefix --find-links=,$(PIP_FIND_LINKS)) \
	  -r requirements/compat-2.11.txt
	@$(BIN)/uv pip install --python $(COMPAT)/bin/python --quiet --no-deps $(addprefix --find-links=,$(PIP_FIND_LINKS)) -e .
	@touch $@

test-cluster: $(READY)  ## Run the tests that need a Kubernetes cluster, against the one of KUBECONFIG
	@test -s "$$KUBECONFIG" || { echo "error: KUBECONFIG names no file. Point it to a cluster with the Kubeflow training operator"; exit 1; }
	@$(BIN)/pytest $(WORKERS) --maxprocesses 2 -m "cluster and not outage" $(ARGS)
	@$(BIN)/pytest -m "cluster and outage" $(ARGS)

e2e: $(READY)  ## Run only the tests that start the whole stack
	@$(BIN)/pytest -m e2e $(ARGS)

lint: $(READY)  ## Check style, types and the arrows between the packages
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(READY)  ## Put the code into shape
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

lock:  ## Compile requirements/*.txt from pyproject.toml, without URLs or hashes
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; }
	@for part in dev airflow trainer curation; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --extra $$part $$(test $$part != curation || echo "--extra text") $$(test $$part = dev || echo "--constraint requirements/dev.txt") \
	    pyproject.toml -o requirements/$$part.txt || exit 1; done
	@grep -vE '^(torch|transformers|triton|nvidia-|cuda-|setuptools|datasets|huggingface|hf-)' requirements/dev.txt | \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --extra trainer --constraint /dev/stdin pyproject.toml requirements/compat-2.11.in \
	    -o requirements/compat-2.11.txt
	@$(BIN)/uv pip list --python $(BIN)/python 2>/dev/null | awk '$$1 == "uv" {print "uv==" $$2}' > requirements/uv.txt

bench: $(READY)  ## Run the benches: every claim of speed beside a peer
	@for file in $$(grep -l '^if __name__' bench/*.py); do \
	  echo "== $$file"; $(BIN)/python -m bench.$$(basename $$file .py) || exit 1; done

clean:  ## Remove caches; the environment and the stack's state stay
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
