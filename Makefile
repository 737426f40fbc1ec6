# `make help` says what there is. Everything happens in a virtual environment in this folder.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -c constraints.txt -e
NEEDS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: demo test oldest check format install clean help

demo: $(VENV)/.demo ## teach the shipped model a cat, from five photos, in minutes on a CPU
	$(BIN)/python train.py experiment=dreambooth_cat $(ARGS)

test: $(VENV)/.dev ## run the tests; ARGS='tests/test_config.py -k nearest' for some
	$(BIN)/python -m pytest $(ARGS)

oldest: $(VENV)/.dev ## the tests of shards, on the oldest webdataset allowed
	$(BIN)/python -m pip install -q --no-deps --upgrade --target build/oldest webdataset==0.2.86
	PYTHONPATH=build/oldest $(BIN)/python -m pytest tests/data/test_webdataset.py tests/data/shards

check: $(VENV)/.dev ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## mend lint and formatting where that can be done by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.dev ## the environment for development: everything the tests need

clean: ## caches and build leftovers; the environment, data and logs stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

# Stamps: what is installed is not looked at again until its list changes. `dev` has all that `demo` has.
# Where venv fails, its bin/python goes: the next make would take half an environment for a whole one.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lit-sd needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.dev: $(NEEDS) | $(VENV)/bin/python
	@echo "installing into $(VENV), once: some gigabytes, most of them torch"
	$(INSTALL) '.[dev]'
	@touch $(VENV)/.dev $(VENV)/.demo

$(VENV)/.demo: $(NEEDS) | $(VENV)/bin/python
	@echo "installing into $(VENV), once: some gigabytes, most of them torch"
	$(INSTALL) '.[demo]'
	@touch $@
