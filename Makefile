# make demo [ENGINE=sglang|hf]   set-up and the whole pipeline on real text (about 6 minutes)
#      [ARGS="--limit 12 --train-seconds 15"]   a quick look
# make test                      set-up, lint, types, unit tests, end-to-end test with a real server
# make py312                     storage tests on Python 3.12 or newer, with the newest zarr
#
# Both need only Python 3.11+ and pip. Environments and the model are made once and reused; a change
# of their requirements re-installs them. Nothing outside this folder is written.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Tried by running them: a shim of pyenv is there even when its Python is not chosen.
PYTHON312 ?= $(shell for p in python3.12 python3.13 python3.14 \
  $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python; do \
  $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
ENGINE ?= sglang
DEMO ?= .demo
ARGS ?=
# Tests at once. They start servers and processes of their own and wait for them a lot, so two even
# on one core; each takes about a gigabyte, so not one for each core of a large machine.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 4 ? 4 : n < 2 ? 2 : n)))
TORCH ?= torch==2.13.0

VENV := .venv
V312 := .venv312
SGL := .venv-sglang
MODEL := .demo/model
CPU := examples/sglang_cpu
# A module's tests stay together: they share servers and lakes. The servers that run beside them go
# first: they have a watchdog, and clients that wait.
pytest = nice -n 10 $(1)/bin/python -m pytest -n $(2) --dist loadfile --no-loadscope-reorder
# Compiled when imported: most of what is installed never is.
pip = $(1)/bin/python -m pip --disable-pip-version-check install -qq --no-compile

.PHONY: help demo test lint types unit py312 e2e e2e-others env env-312 env-sglang model format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \?//p;/^$$/q' Makefile

# torch first: any package that asks for torch later then finds the build chosen here.
$(VENV)/.ready: pyproject.toml examples/requirements.txt examples/requirements-nodeps.txt
	@echo "==> $(VENV): hslake, its tests and the Hugging Face engine (once, about two minutes)"
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(call pip,$(VENV)) $(TORCH)
	$(call pip,$(VENV)) -r examples/requirements.txt -e '.[dev,hf]'
	$(call pip,$(VENV)) --no-deps -r examples/requirements-nodeps.txt
	touch $@

$(SGL)/.ready: pyproject.toml $(CPU)/requirements.txt $(CPU)/requirements-nodeps.txt
	@echo "==> $(SGL): a real SGLang server on the CPU, 1.8 GB (once, about two minutes)"
	[ -x $(SGL)/bin/python ] || $(PYTHON) -m venv $(SGL)
	$(call pip,$(SGL)) $(TORCH)
	$(call pip,$(SGL)) -r $(CPU)/requirements.txt
	$(call pip,$(SGL)) --no-deps -r $(CPU)/requirements-nodeps.txt
	$(SGL)/bin/python -m pip --disable-pip-version-check uninstall -qq -y triton
	$(call pip,$(SGL)) -e .
	touch $@

$(MODEL)/config.json: | $(VENV)/.ready
	@echo "==> $(MODEL): SmolLM2-135M as a Hugging Face folder (once)"
	mkdir -p $(dir $(MODEL))
	$(VENV)/bin/python $(CPU)/convert_smollm2.py $(MODEL) 2>$(MODEL).log || { cat $(MODEL).log; exit 1; }

env: $(VENV)/.ready
env-sglang: $(SGL)/.ready
model: $(MODEL)/config.json

ifeq ($(ENGINE),sglang)
demo: $(SGL)/.ready
endif
demo: $(VENV)/.ready $(MODEL)/config.json
	@echo "==> hslake demo ($(ENGINE))"
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/hslake demo $(DEMO) --engine $(ENGINE) --model $(MODEL) \
	  --server-python $(SGL)/bin/python $(ARGS)

# What mostly waits runs in the background all the while (see BESIDE); the rest in order, each on every
# core. The environments are independent of each other, and installing waits for disk and network.
test:
	@$(MAKE) -j3 env-sglang env env-312 model
	$(MAKE) lint types
	$(call beside,$(MAKE) unit && $(MAKE) py312 && $(MAKE) e2e-others)

lint: $(VENV)/.ready
	@echo "==> lint"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	@echo "==> types"
	$(VENV)/bin/mypy

unit: $(VENV)/.ready
	@echo "==> unit tests"
	$(call pytest,$(VENV),$(JOBS)) tests --ignore tests/e2e

# What touches Zarr, Delta or a store; none of it needs torch.
STORAGE := tests/segment tests/staging tests/test_catalog.py tests/test_compact.py \
  tests/test_lake.py tests/test_s3.py

ifeq ($(PYTHON312),)
env-312:
py312:
	@echo "==> SKIPPED: storage tests with the newest zarr: no Python 3.12 or newer was found;"
	echo "    name one with: make py312 PYTHON312=/path/to/python3.12"
else
$(V312)/.ready: pyproject.toml
	@echo "==> $(V312): hslake and its tests without torch on $(PYTHON312) (once, about a minute)"
	[ -x $(V312)/bin/python ] || $(PYTHON312) -m venv $(V312)
	$(call pip,$(V312)) --upgrade --upgrade-strategy eager -e '.[storage-tests]'
	touch $@

env-312: $(V312)/.ready
py312: $(V312)/.ready
	@echo "==> storage tests with the newest zarr"
	$(V312)/bin/python -c 'import sys, zarr; print("Python", sys.version.split()[0], "zarr", zarr.__version__)'
	$(call pytest,$(V312),$(JOBS)) $(STORAGE) -k 'not ceph'
endif

# Who is not root may mount the small tmpfs that the tests fill in a namespace of their own.
MOUNTS := $(shell [ "$$(id -u)" = 0 ] || ! unshare -Urm true 2>/dev/null || echo unshare -Urm)
# They mostly wait, the first for longer than SGLang's watchdog (HSLAKE_FULL_SECONDS, 400): so each
# runs in a process beside the others, and its output comes after theirs.
BESIDE := full_staging trouble
# Servers at once in the rest; one alone leaves half of two cores idle.
E2E_JOBS ?= 2
E2E := HSLAKE_SGLANG_PYTHON=$(abspath $(SGL))/bin/python HSLAKE_TEST_MODEL=$(abspath $(MODEL))

# $(call beside,COMMAND): COMMAND with BESIDE in the background, then their output. Whatever ends
# this, they end: a background process of a shell ignores Ctrl-C, so they are told to terminate.
define beside
output=$$(mktemp -d); failed=0; beside=
trap 'kill $$beside 2>/dev/null || true; wait; rm -rf "$$output"' EXIT
trap 'exit 130' INT TERM
for name in $(BESIDE); do
  $(E2E) $(MOUNTS) $(VENV)/bin/python -m pytest -rs -p no:cacheprovider tests/e2e/test_$$name.py \
    >"$$output/$$name" 2>&1 & beside="$$beside $$!"
done
{ $(1); } || failed=1
set -- $$beside
for name in $(BESIDE); do
  wait $$1 || failed=1
  echo "==> tests/e2e/test_$$name.py, which ran beside the others"
  cat "$$output/$$name"; shift
done
[ $$failed = 0 ] || echo "==> FAILED: see above"
exit $$failed
endef

e2e: $(VENV)/.ready $(SGL)/.ready $(MODEL)/config.json
	@$(call beside,$(MAKE) e2e-others)

e2e-others: $(VENV)/.ready $(SGL)/.ready $(MODEL)/config.json
	@echo "==> end-to-end tests with real SGLang servers"
	export $(E2E)
	$(call pytest,$(VENV),$(E2E_JOBS)) tests/e2e $(BESIDE:%=--ignore tests/e2e/test_%.py)

format: $(VENV)/.ready
	@$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format --quiet .

# Everything that `make` made, and nothing else: environments, model, the demo's lakes, caches.
clean:
	@rm -rf $(VENV) $(V312) $(SGL) .demo .pytest_cache .ruff_cache .mypy_cache .hypothesis
