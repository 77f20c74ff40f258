# Every command works in a fresh clone on a machine with Python 3.11+ and make; the first one creates .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two files of tests at a time, on large machines too: some start many processes of their own.
# In the order of their names: xdist would leave files of few tests for the end, which are those that take longest.
PARALLEL ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder
# constraints.txt pins everything that is installed here, torch above all.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test quick check format docs dist bench clean

demo: $(VENV)/.installed     ## three rules on two spot traces: a table and an HTML report
	$(BIN)/ebbflow demo

test: $(VENV)/.dev           ## all tests, doctests and examples included
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

quick: $(VENV)/.dev          ## the tests that start no processes, servers or clusters
	$(BIN)/python -m pytest $(PARALLEL) -m "not process and not slow and not long" --hypothesis-profile quick $(ARGS)

check: $(VENV)/.dev          ## style, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev         ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.dev           ## generated pages (API, rules), and all pages as a site in build/site
	$(BIN)/python docs/generate_api.py
	$(BIN)/ebbflow rules cards docs/rules
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: $(VENV)/.dev           ## wheel and sdist in build/dist; the wheel must run the demo in an environment of its own
	rm -rf build/dist build/clean
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --constraint constraints.txt build/dist/*.whl
	cd build && clean/bin/ebbflow demo --out demo

bench: $(VENV)/.dev          ## every benchmark: ours, the peer, the ratio, from one run
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ebbflow needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
