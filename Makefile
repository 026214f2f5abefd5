# Every target works in $(VENV), which is made on first use and made anew only when its requirements change.

VENV ?= .venv
BIN := $(VENV)/bin
REQUIREMENTS := pyproject.toml constraints.txt
# The text of ASK as it was given: it reaches the command through the environment, so no shell reads it.
override ASK := $(value ASK)
export ASK

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## embed your standard library's docstrings and search them; ASK="your question" adds one
	@$(BIN)/penstock demo $(if $(ASK),--ask "$$ASK")

test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.dev ## ruff, ruff format, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench ## print the benchmark tables, peers beside ours
	$(BIN)/python -m tests.benchmarks

clean: ## remove the environment and everything generated
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(BIN)/python $(REQUIREMENTS)
	@echo 'Installing into $(VENV); the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench,demo,dev]'
	@touch $@ $(VENV)/.dev $(VENV)/.demo

$(BIN)/python:
	@for python in python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    if $$python -c 'import ensurepip' 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	    echo "$$python cannot make environments: install its venv package (Debian, Ubuntu: apt install $$python-venv)" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "No Python found. Expected python3.12, python3.11 or a python3 of 3.11 or newer on PATH" >&2; exit 1
