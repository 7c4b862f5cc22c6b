# make demo | make test: all that a fresh machine with Python >= 3.11 and make needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start hundreds of processes: where compiled files may not be written, each compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo venv test quick check-method lint types unit numeric slow durability long long-data contributor tests-full trust engines test-engines test-gpu audit browser pages docs outputs notebooks everything nightly results bench bench-gpu wheels smoke-wheel smoke-wheel-quick sbom lock lint-files release-check clean

help:
	@echo "make demo     install into $(VENV) and run the main job on the offline datasets"
	@echo "make venv     install all that tests and pages need into $(VENV), without running a test"
	@echo "make test     install into $(VENV), then lint, types and the fast tests (4 to 6 minutes on two cores)"
	@echo "make quick    the tests that your change reaches, in seconds"
	@echo "make check-method NAME=fedprox  golden figures, page and tests of one method"
	@echo "make numeric  the tests of numbers, with the kernels of older processors (a minute on two cores)"
	@echo "make slow     the tests that take minutes (kill -9 and resume, the whole offline job)"
	@echo "make durability  kills, damage, liars: the long tests of what is promised, a few of each"
	@echo "make browser  the HTML report and the page of the home in Chromium, without a network; axe-core's findings"
	@echo "make test-engines  real federations through Flower and grids through Ray, on loopback"
	@echo "make test-gpu what a GPU computes, where torch sees one"
	@echo "make audit    dangerous calls (bandit) and advisories of what is installed (pip-audit)"
	@echo "make nightly  every suite in full, fresh examples, mutations, and docs/trust.md (hours); resumes where it stopped"
	@echo "make tests-full  every test with all its cases (an hour)"
	@echo "make trust    docs/trust.md: the promises' cases of tests-full, and each protection removed once"
	@echo "make pages    write the pages of docs/ that are made from the code"
	@echo "make docs     build the documentation into site/; a warning is an error"
	@echo "make outputs  run README, tutorials and notebooks, and write what they print into their pages"
	@echo "make notebooks  run README, tutorials and notebooks; what they print must be what their pages show"
	@echo "make results  make the tables of docs/results.md again"
	@echo "make wheels   build the sdist and the wheel into dist/"
	@echo "make smoke-wheel  install the wheel alone, for every Python of PYTHONS that is here, and run the main job (gigabytes)"
	@echo "make sbom     a bill of materials (CycloneDX) of what the lock file installs, into dist/"
	@echo "make lock     write uv.lock again"
	@echo "make release-check  what is missing for a release"
	@echo "make bench    measure the table of docs/performance.md (about 20 minutes)"
	@echo "make bench-gpu  some of it on a GPU"

# uv installs in half the time of pip; where it cannot be had, or finds less than pip is told of, pip does.
INSTALL = $(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python -e $(1) 2>/dev/null || \
  $(BIN)/python -m pip install --quiet -e $(1)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	-$(BIN)/python -m pip install --quiet uv

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[demo]')
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs]')
	@touch $@ $(VENV)/.demo

comma = ,

# All that .ci/run needs of one environment, resolved once.
everything: $(VENV)/.everything
$(VENV)/.everything: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs$(comma)notebooks$(comma)audit$(comma)browser$(comma)release]')
	@touch $(VENV)/.demo $(VENV)/.dev $(VENV)/.notebooks $(VENV)/.audit $(VENV)/.browser $(VENV)/.release $@

demo: $(VENV)/.demo
	$(BIN)/fedcache demo

venv: $(VENV)/.dev

# Types need one processor, so the tests begin at the same time.
test: $(VENV)/.dev
	$(MAKE) -j2 lint types unit

quick: $(VENV)/.dev
	$(BIN)/python tools/quick.py

# make check-method NAME=fedprox
check-method: $(VENV)/.dev
	$(BIN)/python tools/check_method.py $(NAME)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py
	$(BIN)/python tools/method_catalogue.py --check

types: $(VENV)/.dev
	$(BIN)/mypy

docs: pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --quiet

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow and not durability and not browser and not engines and not gpu'

# torch chooses its kernels by the processor, and sums in another order in each. These are the kernels of a processor
# without AVX-512, and of one without AVX2.
NUMERIC = tests/heads tests/federate/methods/test_methods_closed.py tests/federate/methods/test_methods_oneshot.py \
  tests/contract/test_moved_features.py tests/federate/trust/test_robust_rules.py tests/models/test_python_model.py

numeric: $(VENV)/.dev
	for kernels in avx2 default; do \
	  ATEN_CPU_CAPABILITY=$$kernels OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m 'not slow and not gpu' $(NUMERIC) || exit 1; \
	done

slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m slow

# Slow and durability tests in one session, so that two long tests of one kind do not wait for each other; those of
# extraction and stores apart, because a change of the training side cannot affect them.
LONG = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=0 --durations-min=1 -m 'slow or durability'
LONG_DATA = tests/extract tests/store tests/tables $(wildcard tests/durability/test_kills*.py)
CONTRIBUTOR = tests/project/test_add_a_method.py $(wildcard tests/commands/test_new_*.py)

long: $(VENV)/.dev
	$(LONG) $(LONG_DATA:%=--ignore=%) $(CONTRIBUTOR:%=--ignore=%) tests

long-data: $(VENV)/.dev
	$(LONG) $(LONG_DATA)

# What the pages on adding a method, a backbone and a dataset promise.
contributor: $(VENV)/.dev
	$(LONG) $(CONTRIBUTOR)

durability: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m durability

# All tests of this environment with all their cases. Kills wait more than they compute, so there is one worker more
# than processors. PART=store runs those of tests/store.
tests-full: $(VENV)/.dev
	mkdir -p .nightly
	rm -f .nightly/tests-full.xml .nightly/tests-full$(PART:%=-%)*.xml
	FEDCACHE_CASES=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist worksteal --durations=50 \
	  --junitxml=.nightly/tests-full$(PART:%=-%).xml -m 'not browser and not engines and not gpu' tests$(PART:%=/%)

trust: $(VENV)/.dev
	$(BIN)/python tools/make_trust.py --results .nightly/tests-full*.xml --mutate

$(VENV)/.browser: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs$(comma)browser]')
	@touch $@

browser: $(VENV)/.browser docs
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y chromium; } || \
	  { echo "make browser needs Chromium: apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser tests/browser

# Flower pins older versions of rich and typer, so it has an environment of its own: what differs lies there, and what it
# lacks (torch, gigabytes) is found in the main one. The newest click warns of what typer of those versions asks of it,
# which is nothing of ours.
ENGINES = $(VENV)-engines
PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(ENGINES)/.engines: pyproject.toml $(VENV)/.dev
	$(BIN)/python -m venv $(ENGINES)
	$(BIN)/python $(PACKAGES) > "$$($(ENGINES)/bin/python $(PACKAGES))/main.pth"
	$(ENGINES)/bin/python -m pip install --quiet -e '.[flower,ray]'
	@touch $@

engines: $(ENGINES)/.engines

# Federations wait for one another more than they compute; a file's tests share one, so a process takes whole files.
test-engines: $(ENGINES)/.engines
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q -n 2 --dist loadfile -m engines -W ignore::DeprecationWarning tests/engines

$(VENV)/.audit: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs$(comma)audit]')
	@touch $@

audit: $(VENV)/.audit
	$(BIN)/python tools/audit.py

nightly: everything
	$(BIN)/python tools/nightly.py

pages: $(VENV)/.dev
	$(BIN)/python tools/make_docs.py

$(VENV)/.notebooks: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs$(comma)notebooks]')
	@touch $@

# The outputs that README and tutorials show, and those of the notebooks' pages, from a run of today.
outputs: $(VENV)/.notebooks
	$(BIN)/python tools/run_pages.py --write
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_notebooks.py --write

notebooks: $(VENV)/.notebooks
	$(BIN)/python tools/run_pages.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_notebooks.py

results: $(VENV)/.dev
	$(BIN)/python tools/make_results.py

test-gpu: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 -m gpu tests/gpu

bench-gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks --gpu

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

$(VENV)/.release: pyproject.toml | $(BIN)/python
	$(call INSTALL,'.[dev$(comma)docs$(comma)release]')
	@touch $@

# The wheel is built from the sdist, so a file that the sdist lacks is missing there too.
wheels: $(VENV)/.release
	rm -f dist/fedcache-*
	$(BIN)/python -m build --outdir dist .

PYTHONS ?= python3.11 python3.12 python3.13

smoke-wheel: wheels
	$(BIN)/python tools/smoke_wheel.py $(addprefix --python ,$(PYTHONS))

# The same without a download, for every change: only those packages of this environment that the wheel names.
smoke-wheel-quick: wheels
	$(BIN)/python tools/smoke_wheel.py --borrow --methods fed3r,fedavg --rounds 3

lock: $(VENV)/.release
	$(BIN)/uv lock --python $(BIN)/python

sbom: $(VENV)/.release
	mkdir -p dist
	$(BIN)/uv export --quiet --frozen --extra demo --preview-features sbom-export --format cyclonedx1.5 --output-file dist/fedcache.cdx.json

# The files that other programs read: Dockerfile, workflows, issue forms, citation.
lint-files: $(VENV)/.release
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

release-check: $(VENV)/.release
	$(BIN)/python tools/release.py check

clean:
	rm -rf dist $(VENV) $(VENV)-engines site .pytest_cache .mypy_cache .ruff_cache
