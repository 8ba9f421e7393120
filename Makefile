# make demo    sets up and runs the main job
# make setup   sets up .venv alone
# make test    sets up and passes the tests
# make check   lint, formatting, types
#
# PYTHON=python3.12 chooses the interpreter, VENV=path another place, PYTEST_ARGS=... other options.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
DEMO_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.ulysses-comm-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long check

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

# The constraints hold one torch version: pip takes its CPU build where one is on offer, and a torch
# of that version that is already in the environment stays.
$(STAMP): pyproject.toml constraints/ci.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is older than Python 3.10 or missing. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m ulysses_comm demo $(DEMO_ARGS)

# One thread per process: ranks and test workers outnumber the cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -m long

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
