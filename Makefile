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
TORCH ?= torch==2.13.0

VENV := .venv
V312 := .venv312
SGL := .venv-sglang
MODEL := .demo/model
CPU := examples/sglang_cpu
pip = $(1)/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: help demo test lint types unit py312 e2e env env-sglang model format clean
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

test: lint types unit py312 e2e

lint: $(VENV)/.ready
	@echo "==> lint"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	@echo "==> types"
	$(VENV)/bin/mypy

unit: $(VENV)/.ready
	@echo "==> unit tests"
	$(VENV)/bin/python -m pytest tests --ignore tests/e2e

# What touches Zarr, Delta or a store; none of it needs torch.
STORAGE := tests/segment tests/staging tests/test_catalog.py tests/test_compact.py \
  tests/test_lake.py tests/test_s3.py

ifeq ($(PYTHON312),)
py312:
	@echo "==> SKIPPED: storage tests with the newest zarr: no Python 3.12 or newer was found;"
	echo "    name one with: make py312 PYTHON312=/path/to/python3.12"
else
$(V312)/.ready: pyproject.toml
	@echo "==> $(V312): hslake and its tests without torch on $(PYTHON312) (once, about a minute)"
	[ -x $(V312)/bin/python ] || $(PYTHON312) -m venv $(V312)
	$(call pip,$(V312)) --upgrade --upgrade-strategy eager -e '.[dev]'
	touch $@

py312: $(V312)/.ready
	@echo "==> storage tests with the newest zarr"
	$(V312)/bin/python -c 'import sys, zarr; print("Python", sys.version.split()[0], "zarr", zarr.__version__)'
	$(V312)/bin/python -m pytest $(STORAGE) -k 'not ceph'
endif

# Who is not root may mount the small tmpfs that the tests fill in a namespace of their own.
MOUNTS := $(shell [ "$$(id -u)" = 0 ] || ! unshare -Urm true 2>/dev/null || echo unshare -Urm)
# They mostly wait, the first for longer than SGLang's watchdog (HSLAKE_FULL_SECONDS, 400): so each
# runs in a process beside the others, and its output comes after theirs.
BESIDE := full_staging trouble

e2e: $(VENV)/.ready $(SGL)/.ready $(MODEL)/config.json
	@echo "==> end-to-end tests with real SGLang servers"
	export HSLAKE_SGLANG_PYTHON=$(abspath $(SGL))/bin/python HSLAKE_TEST_MODEL=$(abspath $(MODEL))
	output=$$(mktemp -d); failed=0; beside=
	trap 'kill $$beside 2>/dev/null || true; wait; rm -rf "$$output"' EXIT
	trap 'exit 130' INT TERM
	for name in $(BESIDE); do
	  $(MOUNTS) $(VENV)/bin/python -m pytest -rs -p no:cacheprovider tests/e2e/test_$$name.py \
	    >"$$output/$$name" 2>&1 & beside="$$beside $$!"
	done
	$(VENV)/bin/python -m pytest tests/e2e $(BESIDE:%=--ignore tests/e2e/test_%.py) || failed=1
	set -- $$beside
	for name in $(BESIDE); do
	  wait $$1 || failed=1
	  echo "==> tests/e2e/test_$$name.py, which ran beside them"
	  cat "$$output/$$name"; shift
	done
	exit $$failed

format: $(VENV)/.ready
	@$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format --quiet .

# Everything that `make` made, and nothing else: environments, model, the demo's lakes, caches.
clean:
	@rm -rf $(VENV) $(V312) $(SGL) .demo .pytest_cache .ruff_cache .mypy_cache .hypothesis
