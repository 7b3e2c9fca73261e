# Everything a person types here. The environment is made on first use and again when its requirements change.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# How many `auto` is for cores and memory says tests/conftest.py.
WORKERS := -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder
# Markers of what needs more than this machine and minutes: each has a command of its own.
HERE := not (cluster or exact or chaos or gpu or matrix or images or compose)
SLOW := (slow or dist or e2e)
# Whole gigabytes that are free here. A full disk leaves files that are cut off, which not every tool reports.
FREE = $$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}')
NEEDS_CLUSTER = test -s "$$KUBECONFIG" || \
  { echo "error: KUBECONFIG names no file. Point it to a cluster with the Kubeflow training operator"; exit 1; }
# Where GATE names a file, failing tests run once more and the figures go into that file (tests/gate.py).
GATED = $(if $(GATE),$(CURDIR)/$(BIN)/python -m tests.gate run $@ --)
PYTEST = $(GATED) $(BIN)/pytest
# The lowest releases of torch and transformers that are supported have an environment of their own.
COMPAT := .venv-compat
# Each build would print a note on the theme's successor.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# What starts docker-compose.yaml: Docker's or Podman's compose.
COMPOSE ?= docker compose
# The commit of this clone, `+` behind it if files changed since; nothing without git. Tags have no say.
REVISION := git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null || :
SOURCES := dropforge curation trainer plugins dags tests bench docs/site
# Where it is set, every task, rank and command would compile what it imports of this clone.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo up down doctor test test-fast test-slow test-bounds test-all test-exact test-compat test-gpu test-chaos test-matrix test-cluster test-cluster-smoke test-beside test-outages test-charts test-images test-compose server scan screenshots docs docs-serve docs-reference e2e lint format lock bench clean

help:  ## List the commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## Make the project's environment in .venv
$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $$($(PYTHON) --version) is not supported. Install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make environments. Install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time, PyTorch is large"
	@test $(FREE) -ge 11 || echo "note: $(FREE) GB are free here. With CUDA's PyTorch and nothing in uv's cache the installation takes 10, the demo 1 more"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$$(sed -n 's/^uv==//p' requirements/uv.txt)
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --compile-bytecode $(addprefix --find-links=,$(PIP_FIND_LINKS)) -r requirements/dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps $(addprefix --find-links=,$(PIP_FIND_LINKS)) -e .
	@test $(FREE) -ge 1 || { echo "error: less than 1 GB is free here, and $(VENV) may have files that are cut off."; \
	  echo "Make room (UV_CACHE_DIR=FOLDER has uv's cache on another disk), then: rm -rf $(VENV) && make install"; exit 1; }
	@touch $@

demo: $(READY)  ## Start everything, drop sample data, follow the run to the registered model (ARGS=--exit to stop after)
	@$(BIN)/dropforge demo $(ARGS)

up: $(READY)  ## Start the stack and keep it in the foreground
	@$(BIN)/dropforge up $(ARGS)

down: $(READY)  ## Stop a stack that was left behind
	@$(BIN)/dropforge down $(ARGS)

doctor: $(READY)  ## Check this machine
	@$(BIN)/dropforge doctor $(ARGS)

server:  ## Start a team's server in containers: docker-compose.yaml, with secrets made in .env on first use
	@sh images/compose-env.sh
	@sh images/compose-ports.sh "$(COMPOSE)"
	@DROPFORGE_REVISION="$$($(REVISION))" $(COMPOSE) up -d --build

test: $(READY)  ## Run the tests, at most eight minutes on two cores: all quick ones, and each real part once
	@$(PYTEST) $(WORKERS) --budget 8 -m "(smoke or not $(SLOW)) and $(HERE)" $(ARGS)

test-fast: $(READY)  ## Run the quick tests alone
	@$(PYTEST) $(WORKERS) -m "not ($(SLOW) or smoke) and $(HERE)" $(ARGS)

test-slow: $(READY)  ## Run the other tests that need no cluster, an hour on two cores
	@$(PYTEST) $(WORKERS) --budget 60 -m "$(SLOW) and not smoke and $(HERE)" $(ARGS)

test-bounds: $(READY)  ## Run the quick tests and fail where one is slow and tests/slow.txt does not name it
	@$(PYTEST) $(WORKERS) --bound -m "not ($(SLOW) or smoke) and $(HERE)" $(ARGS)

test-all: $(READY)  ## Run everything that this machine can, hours on two cores, and end with a table
	@CI_FULL=1 bash .ci/run

test-matrix: $(READY)  ## Kill, cut off and clear every task of the fine-tune DAG
	@$(PYTEST) -n0 -m matrix $(ARGS)

screenshots: $(READY)  ## Take the pictures of the docs anew, from a stack of their own
	@DROPFORGE_SCREENSHOTS=.screenshots $(BIN)/pytest -n0 tests/e2e/test_journey.py $(ARGS)
	@for picture in docs/images/*.png; do cp .screenshots/$$(basename $$picture) $$picture; done

docs: $(READY)  ## Build the documentation as a site in .site
	@$(MKDOCS) build --quiet

docs-serve: $(READY)  ## Serve the documentation on 127.0.0.1:8000, and build it anew when a page changes
	@$(MKDOCS) serve --dev-addr 127.0.0.1:8000

docs-reference: $(READY)  ## Write the reference pages of recipe and commands from the code
	@$(BIN)/python -m docs.site.reference

test-exact: $(READY)  ## Run the whole matrix of exactness, of which `make test-slow` runs a part
	@$(PYTEST) $(WORKERS) -m exact $(ARGS)

test-chaos: $(READY)  ## Put a training of two ranks through thirty faults, then kill, stop and cut off the services of the stack
	@$(PYTEST) -n0 -m chaos $(ARGS)

# One process: several would share the GPUs, and what is compared to the bit would wait for memory.
test-gpu: $(READY)  ## Run the matrix, parity, resume, precision and export over NCCL on the GPUs of this machine
	@DROPFORGE_RANKS_ON=cuda $(PYTEST) -n0 -m "(dist and (exact or compat)) or gpu" \
	  tests/trainer/test_ranks_*.py tests/trainer/test_gpu.py $(ARGS)

test-compat: $(COMPAT)/.ready  ## Run parity, resume and the checks at start on the lowest and the newest torch
	@$(GATED) $(COMPAT)/bin/pytest $(WORKERS) -m compat tests/trainer $(ARGS)
	@$(PYTEST) $(WORKERS) -m compat tests/trainer $(ARGS)
$(COMPAT)/.ready: requirements/compat-2.11.txt pyproject.toml $(READY)
	@echo "Installing into $(COMPAT): another PyTorch, 5 GB"
	@test -x $(COMPAT)/bin/python || $(BIN)/python -m venv $(COMPAT)
	@$(BIN)/uv pip install --python $(COMPAT)/bin/python --quiet --compile-bytecode $(addprefix --find-links=,$(PIP_FIND_LINKS)) \
	  -r requirements/compat-2.11.txt
	@$(BIN)/uv pip install --python $(COMPAT)/bin/python --quiet --no-deps $(addprefix --find-links=,$(PIP_FIND_LINKS)) -e .
	@touch $@

# Helm is a program of one file: where there is none, Go makes it beside the environment's others.
test-charts: $(READY)  ## Render the available charts with Helm, which is compiled with Go if it is missing
	@command -v helm >/dev/null || test -x $(BIN)/helm || \
	  { echo "Compiling Helm into $(BIN), a minute or two"; CGO_ENABLED=0 GOBIN=$(CURDIR)/$(BIN) go install -trimpath -ldflags "-s -w" helm.sh/helm/v3/cmd/helm@v3.22.0; }
	@PATH="$$PATH:$(CURDIR)/$(BIN)" $(PYTEST) -n0 tests/dropforge/install/test_charts.py $(ARGS)

test-cluster-smoke: $(READY)  ## Run a few of the tests that need a Kubernetes cluster, at most six minutes
	@$(NEEDS_CLUSTER)
	@$(PYTEST) -n0 --budget 6 -m "cluster and smoke" $(ARGS)

test-cluster: test-beside test-outages  ## Run the tests that need a Kubernetes cluster, against the one of KUBECONFIG

test-beside: $(READY)  # those of the cluster that can run beside each other
	@$(NEEDS_CLUSTER)
	@PATH="$$PATH:$(CURDIR)/$(BIN)" $(PYTEST) $(WORKERS) --maxprocesses 2 -m "cluster and not outage" $(ARGS)

test-outages: $(READY)  # those that take a node or the API server away, one by one
	@PATH="$$PATH:$(CURDIR)/$(BIN)" $(PYTEST) -n0 -m "cluster and outage" $(ARGS)

test-images: $(READY)  ## Build the images and start them, with the tool that DROPFORGE_IMAGE_BUILDER names
	@test -x "$$DROPFORGE_IMAGE_BUILDER" || { echo "error: DROPFORGE_IMAGE_BUILDER names no program; images/README.md says which it is"; exit 1; }
	@$(PYTEST) -n0 -s tests/images $(ARGS)

test-compose: $(READY)  ## Bring docker-compose.yaml up for real, with the tool like podman-compose that DROPFORGE_COMPOSE names, and run a drop through it
	@command -v "$$DROPFORGE_COMPOSE" >/dev/null || { echo "error: DROPFORGE_COMPOSE names no program; docs/internals/docker-compose-coverage.md says which it is"; exit 1; }
	@$(PYTEST) -n0 -s -m compose tests/compose $(ARGS)

# An environment of its own: what looks through packages is none of them.
scan: $(READY)  ## Look up known vulnerabilities of all packages that are in the images
	@test -x .venv-scan/bin/pip-audit || { $(BIN)/python -m venv .venv-scan && \
	  $(BIN)/uv pip install --python .venv-scan/bin/python --quiet $(addprefix --find-links=,$(PIP_FIND_LINKS)) -r requirements/image-tools.txt; }
	@found=0; for part in image-airflow image-curation image-mlflow image-objects image-trainer dev; do \
	  echo "== requirements/$$part.txt: $$(grep -c '==' requirements/$$part.txt) packages"; \
	  .venv-scan/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r requirements/$$part.txt $(ARGS) 2>.venv-scan/said; \
	  code=$$?; cat .venv-scan/said >&2; [ $$code = 0 ] || found=1; \
	  [ $$code = 0 ] || grep -q "known vulnerabilit" .venv-scan/said || echo "requirements/$$part.txt was not scanned: the service does not know all its packages, or did not answer"; \
	  done; exit $$found

e2e: $(READY)  ## Run only the tests that start the whole stack
	@$(PYTEST) -m "e2e and not matrix" $(ARGS)

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
	@for part in "image-tools" "image-objects" "image-mlflow pyproject.toml" \
	    "image-trainer pyproject.toml --extra trainer --extra quantised --extra tensorboard" "image-curation pyproject.toml --extra curation --extra text --extra spark" \
	    "image-airflow pyproject.toml --extra airflow --extra curation --extra text --extra hub --extra lineage"; do \
	  set -- $$part; name=$$1; shift; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --constraint requirements/dev.txt --group $$name "$$@" -o requirements/$$name.txt || exit 1; done
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
