# `make` alone says what there is. Variables of the environment, such as FEWSURE_DATA, reach every command.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
# Byte code is written when a module is first imported: much sooner than compiling all of torch's dependencies.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --prefer-binary --no-compile -c constraints.txt
# One thread a test process: the processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env demo test lint format bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

env: $(VENV)/.base  ## make .venv with the package and what it needs to run

demo: $(VENV)/.base  ## meta-train on the toy tasks for a few minutes and write the report
	$(BIN)/fewsure demo

test: $(VENV)/.dev  ## ruff, then every test (ARGS="-k ..." for some)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PYTEST) $(ARGS)

lint: $(VENV)/.dev  ## ruff and pyright (which needs node)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(VENV)/.dev  ## put the code in its format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.base  ## the ratios of benchmarks/README.md
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/train_step.py

clean:  ## remove the environment, builds and caches; runs/ and results/ stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing fewsure into $(VENV): a minute or two, most of it torch"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing fewsure and what its tests need into $(VENV): a minute or two, most of it torch"
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.base $@
