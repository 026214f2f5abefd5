# Every target works in $(VENV), which is made on first use and made anew only when its requirements change.

VENV ?= .venv
BIN := $(VENV)/bin
OLD_CELERY := $(VENV)-celery56
REQUIREMENTS := pyproject.toml constraints.txt
# The text of ASK as it was given: it reaches the command through the environment, so no shell reads it.
override ASK := $(value ASK)
export ASK

.DEFAULT_GOAL := help
.PHONY: help demo demo-generate demo-safety check test test-quick test-all lint bench bench-gpu chaos fuzz soak test-celery56 docs docs-serve clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## embed your standard library's docstrings and search them; ASK="your question" adds one
	@$(BIN)/penstock demo $(if $(ASK),--ask "$$ASK")

demo-generate: $(VENV)/.demo-generate ## write eight texts at once, by a model that the first run makes; ASK="def parse_date(" begins one
	@$(BIN)/penstock demo --generate $(if $(ASK),--ask "$$ASK")

# Its pictures, its report and its figures.
SAFETY_OUTPUT ?= build/demo-safety

demo-safety: $(VENV)/.demo-safety ## refuse a wrong candidate, promote a right one, break it; writes a report
	@$(BIN)/penstock demo --safety --output $(SAFETY_OUTPUT)

check: $(VENV)/.dev $(VENV)/.docs ## between two edits: lint, and the quick tests that need no server
	@$(MAKE) --no-print-directory -j2 VENV=$(VENV) lint test-quick

test-quick: $(VENV)/.dev
	$(BIN)/python -m tests --no-server -q

test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m tests

test-all: $(VENV)/.dev ## run what `make test` leaves out: repeated faults, all mutants, another redis-server, installs of the wheel, long builds
	$(BIN)/python -m tests --long

lint: $(VENV)/.dev docs ## ruff, ruff format, mypy, the import contracts and the documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench ## print the benchmark tables, peers beside ours
	$(BIN)/python -m tests.benchmarks

bench-gpu: $(VENV)/.bench ## measure what needs a GPU; without one every row says that it was not run
	$(BIN)/python -m tests.benchmarks.gpu

# The minutes of the simulator, the rounds of each fault on real servers, and a file for the table, if any.
SIMULATED_MINUTES ?= 5
FAULT_ROUNDS ?= 20
CHAOS_TABLE ?=

chaos: $(VENV)/.dev ## break everything, often, and print a table of what was lost; takes about 80 minutes
	$(BIN)/python -m tests.simulation --minutes $(SIMULATED_MINUTES)
	$(BIN)/python -m tests.faults --rounds $(FAULT_ROUNDS) $(if $(CHAOS_TABLE),--output $(CHAOS_TABLE))

# The broken requests over HTTP; a fifth as many calls of gRPC.
FUZZED_REQUESTS ?= 100000

fuzz: $(VENV)/.dev ## send 100,000 broken requests to a gateway; takes about a quarter of an hour
	FUZZED_REQUESTS=$(FUZZED_REQUESTS) $(BIN)/python -m pytest -m slow --timeout=7200 tests/producers/gateway/test_fuzz.py

# The jobs and kills of a soak run, its limit in minutes, and a folder for its tables, if any.
SOAK_JOBS ?= 1000000
SOAK_WORKER_KILLS ?= 200
SOAK_BROKER_KILLS ?= 20
SOAK_MINUTES ?= 60
SOAK_OUTPUT ?=

soak: $(VENV)/.dev ## run a million jobs while workers and the broker are killed; takes up to an hour
	$(BIN)/python -m tests.soak --jobs $(SOAK_JOBS) --worker-kills $(SOAK_WORKER_KILLS) \
	  --broker-kills $(SOAK_BROKER_KILLS) --minutes $(SOAK_MINUTES) $(if $(SOAK_OUTPUT),--output $(SOAK_OUTPUT))

test-celery56: $(OLD_CELERY)/.tests ## run what Celery takes part in on the oldest Celery that is supported
	$(OLD_CELERY)/bin/python -m pytest -p no:cacheprovider \
	  tests/workers/celery_bridge tests/flow/test_celery.py

docs: $(VENV)/.docs ## build the documentation into build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs ## serve the documentation on the loopback, built anew at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(OLD_CELERY) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.demo-generate: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[generate,worker]'
	@touch $@

$(VENV)/.demo-safety: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo-safety]'
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@ $(VENV)/.demo $(VENV)/.demo-generate

$(VENV)/.bench: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench,demo,dev]'
	@touch $@ $(VENV)/.dev $(VENV)/.demo $(VENV)/.demo-generate

$(VENV)/.docs: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV)'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# The pins of constraints.txt but for Celery's own family; no torch: none of these tests needs it.
$(OLD_CELERY)/.tests: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(OLD_CELERY)'
	@$(BIN)/python -m venv $(OLD_CELERY)
	@sed -e '/^celery==/d' -e '/^kombu==/d' constraints.txt > $(OLD_CELERY)/constraints.txt
	@$(OLD_CELERY)/bin/python -m pip install --quiet -c $(OLD_CELERY)/constraints.txt -e '.[flower]' \
	  'celery==5.6.3' 'kombu>=5.6,<5.7' hypothesis pytest pytest-timeout
	@touch $@

$(BIN)/python:
	@for python in python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    if $$python -c 'import ensurepip' 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	    echo "$$python cannot make environments: install its venv package (Debian, Ubuntu: apt install $$python-venv)" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "No Python found. Expected python3.12, python3.11 or a python3 of 3.11 or newer on PATH" >&2; exit 1
