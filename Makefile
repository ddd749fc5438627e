# Needs make and Python 3.11 or newer, nothing else. `make` lists what there is.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
INSTALL = $(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable
CONFIG ?= infra/configs/spell.yaml
# Passed on to pytest: make test ARGS="tests/unit -k ledger"
ARGS ?=
# Processes of the tests: most of them wait for a server or another process much of the time.
WORKERS ?= 2
# One benchmark by name: make bench ONLY=sampler. Empty: all.
ONLY ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format types contracts test-slow test-learning torture soak fuzz second-opinion bench clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(STAMP) ## create .venv and install everything that running and testing needs

# Reinstalls only when a requirement changed. The stamp is written last, so an interrupted set-up starts again.
$(STAMP): pyproject.toml infra/constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3.11 and no python3 found; install Python 3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"make: {sys.executable} is Python {v[0]}.{v[1]}; Python 3.11 or newer is needed, give it with PYTHON=")'
	@echo "setting up .venv (a few minutes the first time)"
	@$(BIN)/python -c pass 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	@$(INSTALL) '.[test]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(INSTALL) '.[test,bench]'
	@touch $@

train: $(STAMP) ## a small model learns to spell backwards: SFT, then GRPO, about 4 minutes on 2 cores
	@$(BIN)/trinity-flows finetune -c $(CONFIG)

test: lint types contracts ## everything that a change must pass
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP) ## style, format and spelling
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/codespell

types: $(STAMP) ## pyright
	@$(BIN)/pyright --warnings

contracts: $(STAMP) ## which package may import what
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## fix what the linter can fix, and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test-slow: $(STAMP) ## every slow test, the four below among them
	@$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

test-learning: $(STAMP) ## models must learn, and controls must not
	@$(BIN)/python -m pytest -m 'learning and not gpu' $(ARGS)

torture: $(STAMP) ## runs are killed at random points and must resume to the bit
	@$(BIN)/python -m pytest -m 'torture and not gpu' $(ARGS)

soak: $(STAMP) ## writers and trainers of one buffer are killed hundreds of times; every row is accounted for
	@$(BIN)/python -m pytest -m 'soak and not gpu' -rP $(ARGS)

fuzz: $(STAMP) ## ten thousand damaged, foreign and hostile shards are refused, and never crash a process
	@$(BIN)/python -m pytest -m 'fuzz and not gpu' -rP $(ARGS)

second-opinion: $(BENCH_STAMP) ## losses and advantages against those of TRL, on the same inputs
	@SECOND_OPINION=required $(BIN)/python -m pytest tests/second_opinion $(ARGS)

bench: $(BENCH_STAMP) ## benchmarks, into build/bench.json; one of them: ONLY=name
	@$(BIN)/python -m tests.benchmarks $(ONLY)

clean: ## remove caches and built things; keeps .venv and runs/
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find engines trinity_tasks flows tests -name __pycache__ -type d -prune -exec rm -rf {} +
