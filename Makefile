# `make demo` and `make test` need nothing but a Python >= 3.10: they make .venv and install into it.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
PYTEST_ARGS ?=
# Two tests at a time: most use one core, or wait for ranks to start.
PARALLEL ?= --numprocesses=2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test test-releases test-hosts mutation lint format bench docs clean

help:
	@echo "make venv | demo | test | test-releases | test-hosts | mutation | lint | format | bench | docs | clean"
	@echo "  PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) PYTEST_ARGS=$(PYTEST_ARGS)"

venv: $(INSTALLED)-$(EXTRAS)

demo: $(INSTALLED)-demo
	$(BIN)/megatron-rl-patches demo $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest $(PARALLEL) --dist=loadfile $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(MAKE) test-releases)

# Re-entry, inference-only models and losses on other releases of megatron-core, unpacked from their wheels.
RELEASES ?= 0.12.3 0.14.0 0.19.2
RELEASE_TESTS := release reentry inference_builder inference_checkpoint scoring loss_func
test-releases: venv
	set -e; for release in $(RELEASES); do \
	    $(BIN)/python -m pytest $(PARALLEL) --dist=worksteal --megatron-core $$release \
	        $(RELEASE_TESTS:%=tests/real/test_%.py) $(PYTEST_ARGS); \
	done

# Checkouts of real hosts: make test-hosts SLIME_DIR=... MILES_DIR=... MEGATRON_LM_DIR=... VERL_DIR=...
export SLIME_DIR MILES_DIR MEGATRON_LM_DIR VERL_DIR HOST_REPOSITORIES
test-hosts: venv
	$(BIN)/python -m pytest -m hosts tests/hosts $(PYTEST_ARGS)

# How much of engine and re-entry may break before a unit test sees it: [tool.mutmut] in pyproject.toml.
mutation: $(INSTALLED)-mutation venv
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	set -e; for module in benchmarks/bench_*.py; do \
	    $(BIN)/python -m benchmarks.$$(basename $$module .py); done

docs: $(INSTALLED)-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp per set of extras; all of them live in the same environment.
$(INSTALLED)-%: pyproject.toml setup.cfg constraints/cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[$*]"
	@touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: set PYTHON")'
	$(PYTHON) -m venv $(VENV)
