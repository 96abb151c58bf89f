# All that a newcomer needs: `make demo` and `make test`. Both set up what they use in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check benchmark clean setup setup-tests

help:
	@echo "make demo       set up, run a small study on this machine, end with the path of its report"
	@echo "make test       set up and run every test"
	@echo "make check      ruff, mypy, layers and docs"
	@echo "make benchmark  print the ratios that docs/benchmarks.md speaks of"
	@echo "make clean      remove what these made (results/ stays)"

demo: setup
	$(BIN)/bench run smoke_cpu

test: setup-tests
	$(BIN)/python -m pytest $(TESTS)

check: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/project

benchmark: setup-tests
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed
setup-tests: $(VENV)/.installed-tests

$(VENV)/.installed: pyproject.toml constraints.txt .ci/set-up
	PYTHON=$(PYTHON) bash .ci/set-up $(VENV)

$(VENV)/.installed-tests: $(VENV)/.installed .ci/set-up-tests
	bash .ci/set-up-tests $(VENV)
