# `make demo` and `make test` are all that a newcomer needs. Both install what they use into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where Python may not write bytecode, each of the tests' processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check benchmark gpu campaign torch-releases cluster cluster-down releases clean setup setup-tests

help:
	@echo "make demo       set up, run a small study on this machine, end with the path of its report"
	@echo "make test       set up and run every test"
	@echo "make check      ruff, mypy, layers and docs"
	@echo "make benchmark  print the ratios that docs/benchmarks.md describes"
	@echo "make gpu        on a machine with a GPU: its tests and measurements, in at most 8 minutes"
	@echo "make campaign   on the test cluster: kill bench 50 times, cause every fault, measure known links, plant causes"
	@echo "                of lost time; check intervals by simulation (an hour); SLURM=26.05: another release"
	@echo "make torch-releases  test the measurement with other releases of torch and Python (40 GB, an hour)"
	@echo "make cluster    start a real Slurm on this machine (make cluster-down stops it); SLURM=trixie: another release"
	@echo "make releases   run the tests of the cluster and the fault campaign on four Slurm releases (two hours)"
	@echo "make clean      remove the virtual environment and caches, but not results/"

demo: setup
	$(BIN)/bench run smoke_cpu

# Five tests at a time, because tests on the cluster often wait.
test: setup-tests
	$(BIN)/python -m pytest -n 5 --dist loadscope --no-loadscope-reorder $(TESTS)

check: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --package ddp_scaling_bench  # what runs in a job
	$(BIN)/python -m pytest -q tests/project

# Interleaved rounds; use a quiet machine. docs/benchmarks.md explains them.
benchmark: setup-tests
	failed=0; for name in plan recorder report status; do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py || failed=1; done; exit $$failed

# Everything that needs a GPU, with the given Python as it is: no virtual environment, no network. Writes gpu.json and
# the table in docs/gpu.md. PARTS="mfu formats" runs only these; GPU="--json FILE --page FILE" writes other files.
GPU ?=
PARTS ?=
gpu:
	@$(PYTHON) benchmarks/gpu.py $(PARTS) $(GPU)

# An hour on the test cluster: kill bench submit at random moments, cause every fault of a run, check the intervals of
# simulated studies and the detection of changes, measure links of random rates, and plant causes of lost time. For a
# short one: make campaign KILLS=2 FAULTS=killed STUDIES=20 SERIES=4000 LINKS=1 DRAWS=2
KILLS ?= 50
FAULTS ?=
STUDIES ?= 1000
SERIES ?= 600000
LINKS ?= 5
DRAWS ?= 23
campaign: setup-tests
	$(BIN)/python benchmarks/campaign_submit.py --kills $(KILLS) --slurm "$(SLURM)"
	$(BIN)/python benchmarks/campaign_faults.py --slurm "$(SLURM)" $(FAULTS)
	$(BIN)/python benchmarks/campaign_statistics.py --studies $(STUDIES)
	$(BIN)/python benchmarks/campaign_history.py --series $(SERIES)
	$(BIN)/python benchmarks/campaign_links.py --draws $(LINKS)
	$(BIN)/python benchmarks/campaign_causes.py --draws $(DRAWS) --seed $$(date +%s)

# Virtual environments in the user's cache; they are kept. For one release: make torch-releases RELEASES=2.4.1
RELEASES ?=
torch-releases: setup-tests
	$(BIN)/python benchmarks/torch_releases.py $(RELEASES)

# A real Slurm of four nodes on this machine, to try things (needs root on Debian). SLURM selects another
# release: a Debian suite or a number, such as SLURM=trixie or SLURM=24.11.
SLURM ?=
cluster: setup-tests
	$(BIN)/python -m tests.cluster --slurm "$(SLURM)" up

cluster-down:
	$(BIN)/python -m tests.cluster down

# All tests of the cluster and the fault campaign, on the Slurm of each Debian suite that the mirror has; their last
# lines are the table in docs/clusters.md. For a part: make releases SLURM=trixie TESTS=tests/jobs/slurm
releases: setup-tests
	failed=0; for suite in $(or $(SLURM),bullseye bookworm trixie sid); do echo "== $$suite"; \
	  $(BIN)/python -m pytest -q -m cluster --slurm=$$suite -n 4 --dist=loadscope $(or $(TESTS),tests) || failed=1; \
	  $(BIN)/python benchmarks/campaign_faults.py --slurm=$$suite || failed=1; done; exit $$failed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed
setup-tests: $(VENV)/.installed-tests

$(VENV)/.installed: pyproject.toml constraints.txt .ci/set-up
	PYTHON=$(PYTHON) bash .ci/set-up $(VENV)

$(VENV)/.installed-tests: pyproject.toml constraints.txt .ci/set-up .ci/set-up-tests
	PYTHON=$(PYTHON) bash .ci/set-up $(VENV) '.[dev]'
	bash .ci/set-up-tests
	touch $@
