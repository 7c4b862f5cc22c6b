# make demo | make test: all that a fresh machine with Python >= 3.11 and make needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint types unit slow durability durability-full test-engines audit browser pages docs notebooks results bench clean

help:
	@echo "make demo     install into $(VENV) and run the main job on the offline datasets"
	@echo "make test     install into $(VENV), then lint, types and tests"
	@echo "make slow     the tests that take minutes (kill -9 and resume, the whole offline job)"
	@echo "make durability  kills, damage, liars: the long tests of what is promised (minutes)"
	@echo "make durability-full  all cases and docs/trust.md (an hour)"
	@echo "make browser  the HTML report in Chromium, without a network"
	@echo "make test-engines  real federations through Flower and grids through Ray, on loopback (15 minutes)"
	@echo "make audit    dangerous calls (bandit) and advisories of what is installed (pip-audit)"
	@echo "make pages    write the pages of docs/ that are made from the code"
	@echo "make docs     build the documentation into site/; a warning is an error"
	@echo "make notebooks  run the notebooks of examples/ from top to bottom"
	@echo "make results  make the tables of docs/results.md again"
	@echo "make bench    measure the table of docs/performance.md (about 20 minutes)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/fedcache demo

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m 'not slow and not durability and not browser and not engines'

slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

durability: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m durability

durability-full: $(VENV)/.dev
	$(BIN)/python tools/make_trust.py --full --mutate

browser: $(VENV)/.dev
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y chromium; } || \
	  { echo "make browser needs Chromium: apt-get install chromium"; exit 1; }
	$(BIN)/python -m pip install --quiet -e '.[browser]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser

# Flower pins older versions of rich and typer, so it has an environment of its own. The newest click warns of what typer
# of those versions asks of it, which is nothing of ours.
ENGINES = $(VENV)-engines

$(ENGINES)/.engines: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet -e '.[dev,flower,ray]'
	@touch $@

test-engines: $(ENGINES)/.engines
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q -m engines -W ignore::DeprecationWarning tests/engines

audit: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -e '.[audit]'
	$(BIN)/python tools/audit.py

pages: $(VENV)/.dev
	$(BIN)/python tools/make_docs.py

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --quiet

$(VENV)/.notebooks: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[notebooks]'
	@touch $@

notebooks: $(VENV)/.notebooks
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_notebooks.py

results: $(VENV)/.dev
	$(BIN)/python tools/make_results.py

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-engines site .pytest_cache .mypy_cache .ruff_cache
