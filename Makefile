# Every target works on a fresh clone with only Python >= 3.10 and make; `make` lists them.
PYTHON ?= python3
VENV ?= .venv
# Passed to the script of `make fastsac`, to pytest of `make test`, to benchmarks/compare.py of `make bench`.
ARGS ?=
# Passed to pip, e.g. an index of CPU-only torch builds: make install PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
# Cases of `make bench`.
CASES ?= ingest sample sample_nstep routed_extend ensemble_sample write_back dreamer_replay_path prioritized \
	ring_host_drain ring_push weight_sync
# Of `make bench-suite` and `make bench-compare`: short or full; the revision to compare with, and which benchmarks.
SUITE ?= short
BASE ?= main
KEYWORD ?= ours

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
INSTALLED := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test test-long coverage fastsac dreamer doctor lint format docs bench bench-install \
	bench-suite bench-compare bench-summary clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with the tested versions of constraints.txt (does nothing when up to date)

# The stamp is written last, so an interrupted installation is taken up again.
$(INSTALLED): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make install: Python >= 3.10 is needed, '$(PYTHON)' is not; set PYTHON=/path/to/python3."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) -e ".[sota,test]"
	@touch $@

$(VENV)/.installed-%: $(INSTALLED)
	$(PIP_INSTALL) -e ".[$*]"
	@touch $@

$(VENV)/.installed-peers: benchmarks/requirements-peers.txt $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps -r $<
	@touch $@

# Files of tests side by side: most of them wait for processes of their own.
test: $(INSTALLED) ## run the tests that need no GPU (WORKERS=0: in one process)
	$(BIN)/python -m pytest -q -m "not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

test-long: $(INSTALLED) ## the same with many more random programs (HYPOTHESIS_PROFILE=long)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -m "not gpu" --timeout=3600 $(ARGS)

coverage: $(INSTALLED) ## run the tests and report the lines that none of them reaches
	$(BIN)/python -m pytest -q -m "not gpu" --cov --cov-report=term $(ARGS)

fastsac: $(INSTALLED) ## train FastSAC: a walker learns to walk (options: ARGS="seed=1")
	$(BIN)/python sota_implementations/fast_sac/fast_sac.py $(ARGS)

dreamer: $(INSTALLED) ## train DreamerV3, preset pendulum (options: ARGS="preset=dmc_walker")
	$(BIN)/python sota_implementations/dreamer_v3/dreamer_v3.py $(ARGS)

doctor: $(INSTALLED) ## say what this machine has and can do, and whether the presets can run
	$(BIN)/python -m torchrl_ext.doctor $(ARGS)

lint: $(VENV)/.installed-lint ## ruff (rules and format), mypy, and actionlint where it is installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	@if command -v actionlint >/dev/null; then actionlint; else \
		echo "make lint: the workflows were not checked, actionlint is not installed (https://github.com/rhysd/actionlint)"; fi

format: $(VENV)/.installed-lint ## sort imports, fix what ruff can fix, format
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.installed-docs ## build the documentation in docs/_build/html
	$(BIN)/python -m sphinx -W -n --keep-going -b html docs docs/_build/html $(ARGS)

bench: $(VENV)/.installed-bench $(VENV)/.installed-peers ## compare with the peers (CASES="ingest sample" ARGS="--device cuda")
	$(BIN)/python benchmarks/compare.py $(CASES) $(ARGS)

bench-install: $(VENV)/.installed-bench $(VENV)/.installed-peers ## install what the benchmarks use

# Not the options of the tests: no examples of docstrings, and a full benchmark takes minutes.
bench-suite: bench-install ## pytest-benchmark (SUITE=full ARGS="--device cuda")
	$(BIN)/python -m pytest benchmarks/test_*_benchmark.py -o addopts=-ra --timeout=1800 --suite $(SUITE) $(ARGS)

bench-compare: bench-install ## is this tree slower than BASE=main? (ARGS="--pairs 8")
	$(BIN)/python benchmarks/compare_revisions.py $(BASE) --keyword "$(KEYWORD)" $(ARGS) -- --suite $(SUITE)

bench-summary: $(INSTALLED) ## write the README's table from benchmarks/reports (ARGS=--check)
	$(BIN)/python benchmarks/summary.py $(ARGS)

clean: ## remove .venv, caches and build outputs (keeps outputs/)
	rm -rf $(VENV) build dist docs/_build docs/reference/generated htmlcov .coverage .coverage.* \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks _vizdoom _vizdoom.ini *.egg-info
	find torchrl_ext test benchmarks sota_implementations -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
