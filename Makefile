# Tidings: everything a developer runs. Set-up is automatic and redone when the pins change;
# nothing is needed but Python 3.11+, make and pip's usual configuration.
#
#   make PYTHON=python3.12 test     another interpreter, when .venv is made
#   make PYTEST_ARGS="-k journal" test
#   make PYTEST_PROCESSES=4 test    tests in four processes instead of three
#   make RUN_ARGS="--port 9000" run

PYTHON ?= python3
PYTEST_ARGS ?=
PYTEST_PROCESSES ?= 3
BENCH_ARGS ?=
SOAK_ARGS ?=
RUN_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
INSTALL = $(BIN)/python tools/install.py
STAMP := $(VENV)/.stamp-dev
SERVER_STAMP := $(VENV)/.stamp-server
BENCH_STAMP := $(VENV)/.stamp-bench
NODE_STAMP := $(VENV)/.stamp-node
DOCS_VENV := $(VENV)/docs
DOCS_STAMP := $(DOCS_VENV)/.stamp
COMPILED := src/tidings/log/_line_codec.pyx src/tidings/log/embedded/_index_keys.pyx
PACKAGE := pyproject.toml hatch_build.py $(COMPILED)

# Configurations of the person at the keyboard must not reach into .venv; without bytecode every process that a test starts
# would compile all that it imports.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-docs lint ruff mypy contracts fmt collection unit heavy bench conformance conformance-check docs soak clean distclean

help:
	@echo "make run          a node with demo events and tokens until Ctrl-C; beside it Spark is set up and the pipeline runs; again: goes on"
	@echo "make test         set up, lint, test, check docs/conformance.md and docs/bounds.md"
	@echo "make lint         ruff, mypy, import contracts, requirements and limits"
	@echo "make fmt          format and fix what ruff can fix"
	@echo "make heavy        the crash loops, and all that is too long for every run"
	@echo "make test-docs    all that the pages say, done as it is written, twice; a new clone, the site, other versions of Python"
	@echo "make bench        the benchmarks"
	@echo "make soak         an hour of mixed load on a node: memory, descriptors and disk must stay flat (SOAK_ARGS=\"--minutes 5\")"
	@echo "make conformance  rewrite docs/conformance.md and docs/bounds.md from the tests' marks, and the reference from the code"
	@echo "make docs         the pages as a site with search, in build/docs; needs neither the rest of the set-up nor, once made, a network"
	@echo "make clean        remove caches, build products, the demo workspace"
	@echo "make distclean    clean, and remove .venv"

setup: $(STAMP)

# What a new environment gets last.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@echo "set-up: $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# A stamp is touched last: an interrupted set-up is taken up again by the next make. What the tests need has all the rest in it.
$(STAMP): requirements/dev.txt $(PACKAGE) | $(BIN)/pip
	@$(INSTALL) "everything" requirements/dev.txt --package
	@touch $(SERVER_STAMP) $@

$(SERVER_STAMP): requirements/server.txt $(PACKAGE) | $(BIN)/pip
	@$(INSTALL) "the node" requirements/server.txt --package
	@touch $@

# The node is up long before Spark is: the demo has that installed beside the node, when it serves.
run: $(SERVER_STAMP)
	@$(BIN)/tidings demo --workspace ./demo-workspace --pipeline \
		--pipeline-setup "$(INSTALL) 'the pipeline' requirements/pipeline.txt --lines" $(RUN_ARGS)

# What takes one core only goes side by side: mypy, and finding the tests, which leaves bytecode for the processes that run them.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 mypy collection $(NODE_STAMP) ruff contracts conformance-check
	@$(MAKE) --no-print-directory unit

lint: ruff mypy contracts conformance-check

ruff: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo

collection: $(STAMP)
	@$(BIN)/python -m pytest --collect-only -q -m "not heavy" $(PYTEST_ARGS) > $(VENV)/collection.txt \
		|| { cat $(VENV)/collection.txt; exit 1; }

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The JavaScript clients that the sync endpoint is tested with. Node and npm are in .venv: no other is needed or looked for.
$(NODE_STAMP): tests/node/package.json tests/node/package-lock.json tests/node/.npmrc $(STAMP)
	@echo "set-up: JavaScript clients for the tests"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/npm ci --prefix tests/node --no-audit --no-fund --loglevel error
	@touch $@

unit: $(STAMP) $(NODE_STAMP)
	$(BIN)/python -m pytest -m "not heavy" -n $(PYTEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

heavy: $(STAMP) $(NODE_STAMP)
	$(BIN)/python -m pytest -m "crash or heavy" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not heavy" --hypothesis-profile=full $(PYTEST_ARGS)

# What takes minutes too, and needs a network; nothing of it needs more on the path than the system's own programs.
test-docs: $(STAMP) $(NODE_STAMP) $(DOCS_STAMP)
	$(BIN)/python -m pytest tests/docs $(PYTEST_ARGS)

# The rivals that the bus is measured against; nothing else needs them.
$(BENCH_STAMP): requirements/bench.txt $(STAMP)
	@echo "set-up: rivals for the benchmarks"
	@$(PIP) -r requirements/bench.txt
	@touch $@

bench: $(BENCH_STAMP) $(NODE_STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

conformance: $(STAMP)
	$(BIN)/python -m tools.conformance
	$(BIN)/python -m tools.bounds
	$(BIN)/python -m tools.reference

conformance-check: $(STAMP)
	$(BIN)/python -m tools.conformance --check
	$(BIN)/python -m tools.bounds --check

# What makes the site has a folder of its own: nothing else needs it, and it needs nothing else.
$(DOCS_STAMP): requirements/docs.txt tools/site/package.json tools/site/package-lock.json tools/site/.npmrc
	@echo "set-up: $(DOCS_VENV)"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	@PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" $(DOCS_VENV)/bin/npm ci --prefix tools/site --no-audit --no-fund --loglevel error
	@touch $@

docs: $(DOCS_STAMP)
	@$(DOCS_VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going -d build/docs-cache -c docs . build/docs
	@echo "the pages are in build/docs: open build/docs/index.html"

clean:
	rm -rf build dist demo-workspace .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) tests/node/node_modules tools/site/node_modules $(COMPILED:.pyx=.*.so)
