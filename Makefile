# All that a newcomer needs: `make demo` and `make test`. Both set up what they use in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check benchmark campaign cluster cluster-down clean setup setup-tests

help:
	@echo "make demo       set up, run a small study on this machine, end with the path of its report"
	@echo "make test       set up and run every test"
	@echo "make check      ruff, mypy, layers and docs"
	@echo "make benchmark  print the ratios that docs/benchmarks.md speaks of"
	@echo "make campaign   kill bench submit 50 times on the test cluster; bring about every fault; count intervals"
	@echo "make cluster    a real Slurm on this machine (make cluster-down ends it)"
	@echo "make clean      remove what these made (results/ stays)"

demo: setup
	$(BIN)/bench run smoke_cpu

# Three at a time: tests on the cluster wait more than they compute. Then those that compare times, one
# by one (pytest says 5 where TESTS holds none of a kind).
test: setup-tests
	$(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder -m "not alone" $(TESTS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m alone $(TESTS) || [ $$? = 5 ]

check: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/project

# Ratios of interleaved rounds, best on a quiet machine; docs/benchmarks.md says what they mean.
benchmark: setup-tests
	failed=0; for name in plan overhead recorder report submit status; do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py || failed=1; done; exit $$failed

# Long (half an hour), on the test cluster: bench submit is killed at random moments; every fault a run can
# meet; the intervals of simulated studies. Short: make campaign KILLS=2 FAULTS=killed STUDIES=20 PREDICTIONS=5
KILLS ?= 50
FAULTS ?=
STUDIES ?= 1000
PREDICTIONS ?= 500
campaign: setup-tests
	$(BIN)/python benchmarks/campaign_submit.py --kills $(KILLS)
	$(BIN)/python benchmarks/campaign_faults.py $(FAULTS)
	$(BIN)/python benchmarks/campaign_statistics.py --studies $(STUDIES) --predictions $(PREDICTIONS)
	$(BIN)/python benchmarks/campaign_compare.py --studies $(STUDIES)

# A real Slurm of four nodes on this machine, to play with (root, Debian).
cluster: setup-tests
	$(BIN)/python -m tests.cluster up

cluster-down:
	$(BIN)/python -m tests.cluster down

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed
setup-tests: $(VENV)/.installed-tests

$(VENV)/.installed: pyproject.toml constraints.txt .ci/set-up
	PYTHON=$(PYTHON) bash .ci/set-up $(VENV)

$(VENV)/.installed-tests: $(VENV)/.installed .ci/set-up-tests
	bash .ci/set-up-tests $(VENV)
