# Tidings: everything a developer runs. Set-up is automatic and redone when the pins change;
# nothing is needed but Python 3.11+, make and pip's usual configuration.
#
#   make PYTHON=python3.12 test     another interpreter, when .venv is made
#   make PYTEST_ARGS="-k journal" test
#   make PYTEST_PROCESSES=4 test    tests in four processes instead of three

PYTHON ?= python3
PYTEST_ARGS ?=
PYTEST_PROCESSES ?= 3
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
STAMP := $(VENV)/.stamp-dev
BENCH_STAMP := $(VENV)/.stamp-bench
NODE_STAMP := $(VENV)/.stamp-node
COMPILED := src/tidings/log/_line_codec.pyx src/tidings/log/embedded/_index_keys.pyx

# Configurations of the person at the keyboard (PYTHONPATH, PYTHONHOME) must not reach into .venv.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup run test lint fmt unit heavy bench conformance conformance-check clean distclean

help:
	@echo "make run          set up, then run a node with demo events, tokens and a pipeline pass until Ctrl-C; again: goes on"
	@echo "make test         set up, lint, test, check docs/conformance.md"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make fmt          format and fix what ruff can fix"
	@echo "make heavy        the crash loops, and all that is too long for every run"
	@echo "make bench        the benchmarks"
	@echo "make conformance  rewrite docs/conformance.md from the tests' marks, and the page of happenings"
	@echo "make clean        remove caches, build products, the demo workspace"
	@echo "make distclean    clean, and remove .venv"

setup: $(STAMP)

# The stamp is touched last: an interrupted set-up is taken up again by the next make.
$(STAMP): requirements/dev.txt pyproject.toml hatch_build.py $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@echo "set-up: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Spark comes as source, and half of the time goes into packing it: beside the rest. All versions are pinned, so nothing is resolved.
	@grep '^pyspark==' requirements/dev.txt | $(PIP) --no-deps -r /dev/stdin & spark=$$!; \
		grep -v '^pyspark==' requirements/dev.txt | $(PIP) --no-deps -r /dev/stdin && wait $$spark
	@$(PIP) --no-deps -e .
	@touch $@

run: $(STAMP)
	$(BIN)/tidings demo --workspace ./demo-workspace --pipeline

test: lint unit conformance-check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The JavaScript clients that the sync endpoint is tested with. Node and npm are in .venv: no other is needed or looked for.
$(NODE_STAMP): tests/node/package.json tests/node/package-lock.json tests/node/.npmrc $(STAMP)
	@echo "set-up: JavaScript clients for the tests"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/npm ci --prefix tests/node --no-audit --no-fund --silent
	@touch $@

unit: $(STAMP) $(NODE_STAMP)
	$(BIN)/python -m pytest -m "not heavy" -n $(PYTEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

heavy: $(STAMP) $(NODE_STAMP)
	$(BIN)/python -m pytest -m "crash or heavy" $(PYTEST_ARGS)

# The rivals that the bus is measured against; nothing else needs them.
$(BENCH_STAMP): requirements/bench.txt $(STAMP)
	@echo "set-up: rivals for the benchmarks"
	@$(PIP) -r requirements/bench.txt
	@touch $@

bench: $(BENCH_STAMP) $(NODE_STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

conformance: $(STAMP)
	$(BIN)/python -m tools.conformance
	$(BIN)/python -m tools.happenings_page

conformance-check: $(STAMP)
	$(BIN)/python -m tools.conformance --check

clean:
	rm -rf build dist demo-workspace .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) tests/node/node_modules $(COMPILED:.pyx=.*.so)
