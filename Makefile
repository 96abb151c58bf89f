# `make demo` and `make test` are all that a newcomer needs. Both install what they use into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where Python may not write bytecode, each of the tests' processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check benchmark gpu campaign campaign-causes campaign-disturbed campaign-links campaign-preflight slow-nodes torch-releases cluster cluster-down releases clean setup setup-tests

help:
	@echo "make demo       set up, run a small study on this machine, end with the path of its report"
	@echo "make test       set up and run every test"
	@echo "make check      ruff, mypy, layers and docs"
	@echo "make benchmark  print the ratios that docs/benchmarks.md describes"
	@echo "make gpu        on a machine with a GPU: its tests and measurements, in at most 8 minutes"
	@echo "make campaign   kill bench submit 50 times on the test cluster, cause every fault, check intervals by simulation"
	@echo "make slow-nodes  count false alarms about slow nodes in simulated studies"
	@echo "make campaign-causes  plant causes of lost time in a script, and check which are named (25 minutes)"
	@echo "make campaign-disturbed  disturb runs on the test cluster, and check which runs are called disturbed"
	@echo "make campaign-links  measure links of random rates on the test cluster with the default settings"
	@echo "make campaign-preflight  check on the test cluster and by simulation that bench preflight finds slow nodes and links"
	@echo "make torch-releases  test the measurement with other releases of torch and Python (40 GB, an hour)"
	@echo "make cluster    start a real Slurm on this machine (make cluster-down stops it); SLURM=trixie: another release"
	@echo "make releases   run the tests of the cluster and the fault campaign on four Slurm releases (two hours)"
	@echo "make clean      remove the virtual environment and caches, but not results/"

demo: setup
	$(BIN)/bench run smoke_cpu

# First the tests that compare times, one by one: the modules that this compiles need not be compiled by each of
# the four workers. Then the others, four at a time, because tests on the cluster often wait.
# (pytest exits with 5 if TESTS contains no test of a kind.)
test: setup-tests
	failed=0; \
	$(BIN)/python -m pytest -m alone $(TESTS) || [ $$? = 5 ] || failed=1; \
	$(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder -m "not alone" $(TESTS) \
	  || [ $$? = 5 ] || failed=1; \
	exit $$failed

check: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/project

# Ratios of interleaved rounds; use a quiet machine. docs/benchmarks.md explains them.
benchmark: setup-tests
	failed=0; for name in plan overhead recorder report submit status; do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py || failed=1; done; exit $$failed

# Everything that needs a GPU, with the given Python as it is: no virtual environment, no network. Writes gpu.json and
# the table in docs/gpu.md. GPU="--json FILE --page FILE" writes other files.
GPU ?=
gpu:
	@$(PYTHON) benchmarks/gpu.py $(GPU)

# Half an hour on the test cluster: kill bench submit at random moments, cause every fault of a run, and check
# the intervals of simulated studies. For a short one: make campaign KILLS=2 FAULTS=killed STUDIES=20
KILLS ?= 50
FAULTS ?=
STUDIES ?= 1000
TRIALS ?= 3000
campaign: setup-tests
	$(BIN)/python benchmarks/campaign_submit.py --kills $(KILLS)
	$(BIN)/python benchmarks/campaign_faults.py $(FAULTS)
	$(BIN)/python benchmarks/campaign_statistics.py --studies $(STUDIES)
	$(BIN)/python benchmarks/campaign_compare.py --studies $(STUDIES)
	$(BIN)/python benchmarks/campaign_damage.py --trials $(TRIALS)

slow-nodes: setup-tests
	$(BIN)/python benchmarks/campaign_slow_nodes.py --studies $(STUDIES)

# An hour on the test cluster: disturb runs by jobs and processes on their nodes, and check which are called disturbed.
DRAWS ?= 40
HEALTHY ?= 12
campaign-disturbed: setup-tests
	$(BIN)/python benchmarks/campaign_disturbed.py --draws $(DRAWS) --studies $(HEALTHY)

# For a part: make campaign-causes KINDS="checkpoint metrics" SEEDS=1; CAUSES=--pairs or --local.
KINDS ?=
SEEDS ?= 3
CAUSES ?=
campaign-causes: setup-tests
	$(BIN)/python benchmarks/campaign_causes.py --seeds $(SEEDS) $(CAUSES) $(KINDS)

# Links of random rates, measured with the default settings: LINKS of a minute each.
LINKS ?= 5
campaign-links: setup-tests
	$(BIN)/python benchmarks/campaign_links.py --draws $(LINKS)

# An hour on the test cluster, and simulated networks. For a short one:
# make campaign-preflight PREFLIGHTS="--draws 2 --two 1 --eight 0 --simulated 200"
PREFLIGHTS ?=
campaign-preflight: setup-tests
	$(BIN)/python benchmarks/campaign_preflight.py $(PREFLIGHTS)

# Virtual environments in the user's cache; they are kept. For one release: make torch-releases RELEASES=2.4.1
RELEASES ?=
torch-releases: setup-tests
	$(BIN)/python benchmarks/torch_releases.py --write $(RELEASES)

# A real Slurm of four nodes on this machine, to try things (needs root on Debian). SLURM selects another
# release: a Debian suite or a number, such as SLURM=trixie or SLURM=24.11.
SLURM ?=
cluster: setup-tests
	$(BIN)/python -m tests.cluster --slurm "$(SLURM)" up

cluster-down:
	$(BIN)/python -m tests.cluster down

# All tests of the cluster and the fault campaign, on the Slurm of each Debian suite that the mirror has; writes
# the table in docs/clusters.md. For a part: make releases SLURM=trixie TESTS=tests/jobs/slurm
releases: setup-tests
	$(BIN)/python benchmarks/campaign_releases.py $(addprefix --slurm=,$(SLURM)) $(TESTS)

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
