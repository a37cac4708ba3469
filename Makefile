# quantkit: development tasks. `make` lists them.
#
# Variables, on the command line or in the environment:
#   PYTHON        interpreter that the virtual environment is made from (3.11 to 3.13)
#   VENV          the virtual environment
#   TORCH         what is given to pip for torch; may hold options, e.g. TORCH='torch==2.13.0 --index-url URL'
#   SYSTEM_TORCH  1: use the torch that PYTHON already has (a vendor's ROCm or DTK build), never install one
#   PYTEST_ARGS   arguments of pytest, e.g. PYTEST_ARGS='-k reader -x'
#   MINUTES       of `make fuzz`, on two processes
#   SMALL         1: benchmarks on small input, some minutes instead of hours; results stay in build/bench

PYTHON       ?= python3
VENV         ?= .venv
TORCH        ?= torch==2.13.0
SYSTEM_TORCH ?=
PYTEST_ARGS  ?= -n 2
MINUTES      ?= 60
SMALL        ?=

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
# Each kind of environment has its own stamp: switching SYSTEM_TORCH finds the other one and starts afresh.
OWN_STAMP    := $(VENV)/.installed-own-torch
SYSTEM_STAMP := $(VENV)/.installed-system-torch
ifeq ($(SYSTEM_TORCH),1)
STAMP      := $(SYSTEM_STAMP)
VENV_FLAGS := --system-site-packages $(if $(wildcard $(OWN_STAMP)),--clear)
else
STAMP      := $(OWN_STAMP)
VENV_FLAGS := $(if $(wildcard $(SYSTEM_STAMP)),--clear)
endif
SMOLLM2 := tests/models/smollm2-135m

# Model hubs are never asked: everything that the tests load is in the repository or fetched by `make smollm2`.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test lint lint-format lint-rules lint-types format smollm2 plans clean
.PHONY: fuzz audit
.PHONY: kernels kernel-tools bench-gpu peers bench bench-summary bench-accuracy interop interop-acceptance

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## create or update the virtual environment

# torch first and on its own: it is the one package whose right build depends on the machine. Once it is there,
# pin_torch.py pins that very build, and the second install cannot replace it.
$(STAMP): pyproject.toml setup.py constraints.txt tools/pin_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	    || { echo "error: $(PYTHON) is not Python 3.11 to 3.13; choose one: make venv PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
ifeq ($(SYSTEM_TORCH),1)
	@# Importing finds what metadata cannot: a build whose driver libraries are not on the loader's path.
	@$(BIN)/python -c 'import torch' \
	    || { echo "error: SYSTEM_TORCH=1, but torch cannot be imported by $(PYTHON) (reason above)." >&2; \
	         echo "hint: install the vendor's wheel, load its environment script, or name the interpreter that has it:" >&2; \
	         echo "      make venv SYSTEM_TORCH=1 PYTHON=/path/to/python3. It must not be a virtual environment: those" >&2; \
	         echo "      hand nothing down. Into an existing one: pip install -e . -c <(python tools/pin_torch.py constraints.txt)" >&2; \
	         exit 1; }
else
	$(BIN)/python -m pip install --quiet $(TORCH)
endif
	$(BIN)/python tools/pin_torch.py constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[test]' -c $(VENV)/constraints.txt
	@touch $@

demo: venv  ## quantize, shard, verify and run a small model; everything lands in demo_output/
	$(OFFLINE) $(BIN)/python runtime/demo.py --output demo_output

smollm2: venv  ## fetch SmolLM2-135M-Instruct, the real dense model of the tests (93 MB)
	@$(OFFLINE) $(BIN)/python tests/models/fetch_smollm2.py $(SMOLLM2)

# One thread for each worker: more of them only fight for the cores.
test: venv smollm2  ## run all tests
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS)

# Longer than the cases that `make test` runs; a finding prints the command that shows it again.
fuzz: venv  ## damaged files and answers for every parser, for MINUTES; result in tests/bench/results/fuzz.json
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(OFFLINE) $(BIN)/python -m tests.fuzz --minutes $(MINUTES) \
	    --workers 2 --first-seed $$RANDOM --result tests/bench/results/fuzz.json

# Asks the vulnerability service of PyPI, so it needs the network; a version that it does not know is a failure. In an
# environment of its own.
audit:  ## look for known vulnerabilities in the versions of constraints.txt (needs the network)
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit; \
	    build/audit/bin/python -m pip install --quiet pip-audit; }
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off

# Nothing that is there is replaced: a vendor's Triton (SYSTEM_TORCH=1) and hipcc stay.
kernel-tools: venv  ## install what checks the kernels without a card: Triton, and hipcc on Debian (700 MB)
	@$(BIN)/python -c 'import triton' 2>/dev/null \
	    || $(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt triton
	@command -v hipcc >/dev/null || { \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	    $$sudo apt-get update -qq; \
	    DEBIAN_FRONTEND=noninteractive $$sudo apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
	        --no-install-recommends hipcc libamdhip64-dev >/dev/null; }

# Interpreted by Triton, compiled for AMD cards, run on the CPU through the shim; missing tools are failures here.
kernels: kernel-tools  ## check the kernels without a card
	OMP_NUM_THREADS=1 QUANTKIT_KERNEL_TOOLS=required $(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS) tests/runtime/kernels

# Three targets, so that `make -k lint` reports everything and not only the first kind of finding.
lint: lint-format lint-rules lint-types  ## check format, lint rules and types

lint-format: venv
	$(BIN)/python -m ruff format --check .

lint-rules: venv
	$(BIN)/python -m ruff check .

lint-types: venv
	$(BIN)/python -m mypy

format: venv  ## rewrite the code to the project's format and fix what can be fixed safely
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

plans: venv  ## write recipes/plans anew: what `quantkit plan` says of published models
	$(OFFLINE) $(BIN)/python -m tests.plan.published

# ------------------------------------------------------------------------------------------ benchmarks
# Measured on an otherwise quiet machine; what each one does and needs is in tests/bench/README.md.

BENCH_ARGS := $(if $(filter 1,$(SMALL)),--small)
BENCH      := $(OFFLINE) $(BIN)/python tests/bench

peers: venv  ## make the environment of the tool that is measured beside ours, in .peers/ (1.5 GB)
	@$(BIN)/python tests/bench/peers.py llmcompressor --torch '$(TORCH)'

bench: peers smollm2  ## time and memory: conversion, verification, planning, calibration; faults; SMALL=1 for a trial
	@$(BENCH)/convert_speed.py $(BENCH_ARGS)
	@$(BENCH)/verify_speed.py $(BENCH_ARGS)
	@$(BENCH)/quick_start.py $(BENCH_ARGS)
	@$(BENCH)/plan_speed.py $(BENCH_ARGS)
	@$(BENCH)/replicas.py $(BENCH_ARGS)
	@$(BENCH)/many_tensors.py $(BENCH_ARGS)
	@$(BENCH)/calibrate_memory.py $(BENCH_ARGS)
	@$(BENCH)/calibrate_speed.py $(BENCH_ARGS)
	@$(BENCH)/faults.py $(BENCH_ARGS)
	@$(BENCH)/summary.py $(BENCH_ARGS)

bench-summary: venv  ## the closing table and plots of all results that are there, without measuring
	@$(BENCH)/summary.py $(BENCH_ARGS)

bench-accuracy: peers smollm2  ## perplexity and KL of every recipe and of the peer; SMALL=1 for a trial
	@$(BENCH)/accuracy.py $(BENCH_ARGS)

interop: venv smollm2  ## convert SmolLM2 and run it in vLLM's CPU build, in .peers/ (3.5 GB)
	@$(BIN)/python tests/bench/peers.py vllm --torch '$(TORCH)'
	rm -rf build/bench/interop
	@$(OFFLINE) $(BIN)/python -m quantkit convert $(SMOLLM2) -o build/bench/interop
	@.peers/vllm/bin/python tests/bench/interop_vllm.py build/bench/interop $(if $(BENCH_ARGS),,--source $(SMOLLM2))

interop-acceptance: venv smollm2  ## serve it with vLLM's CPU build and let `quantkit acceptance` judge it (20 minutes)
	@$(BIN)/python tests/bench/peers.py vllm --torch '$(TORCH)'
	rm -rf build/bench/acceptance
	@$(OFFLINE) $(BIN)/python -m quantkit convert $(SMOLLM2) -o build/bench/acceptance/checkpoint
	@$(OFFLINE) $(BIN)/python -m quantkit baseline $(SMOLLM2) -o build/bench/acceptance/baseline \
	    --texts 1 --tokens 256 --new-tokens 24 --long-tokens 1 --probe-tokens 32
	@$(OFFLINE) $(BIN)/python tests/bench/accept_vllm.py build/bench/acceptance/checkpoint \
	    -o build/bench/acceptance/report --baseline build/bench/acceptance/baseline

bench-gpu:  ## on a card, with any python that has torch and Triton: PYTHON=python3; tunes first; two cards measure --tp 2
	$(PYTHON) tests/bench/gpu_kernels.py --tune
	$(PYTHON) tests/bench/gpu_engine.py
	$(PYTHON) tests/bench/loading.py --device cuda

clean:  ## remove the environment, caches and what was generated; fetched models stay
	@if [ -f $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi
	rm -rf demo_output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quantkit runtime recipes calibration_data tests tools -name __pycache__ -prune -exec rm -rf {} +
