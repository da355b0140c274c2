# Builds, tests and runs tpu_dist. `make help` lists the targets.
#
# Variables: PYTHON (3.11 or newer) makes the virtual environment; TORCH is the torch
# requirement; PIP_ARGS is passed to pip, for another package index for example.

PYTHON ?= python3
TORCH ?= torch==2.15.*
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
WHEELS := build/wheels

RUST := $(shell find crates -name '*.rs' -o -name '*.toml' -o -name '*.cpp' -o -name '*.hpp')
PACKAGE := $(shell find python -name '*.py' -o -name '*.pyi' -o -name 'py.typed')
BENCHES := $(wildcard benches/bench_*.py)

export PYO3_PYTHON := $(abspath $(BIN)/python)

.PHONY: help build demo test bench lint clean
.DELETE_ON_ERROR:

help:
	@echo "make build   build the wheel and install it into $(VENV)"
	@echo "make demo    train a classifier with DDP on four processes"
	@echo "make test    all checks and tests"
	@echo "make bench   compare with Gloo"
	@echo "make lint    formatters, linters, type checker"
	@echo "make clean   remove what was built, and $(VENV)"

# The virtual environment, made once; torch and the tools, installed once.
$(STAMPS)/venv:
	@tools/require.sh "$(PYTHON)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/requirements: $(STAMPS)/venv pyproject.toml tools/extras.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    "$(TORCH)" "maturin>=1.9,<2" $$($(BIN)/python tools/extras.py demo test bench)
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/requirements $(RUST) $(PACKAGE) Cargo.toml Cargo.lock README.md
	rm -rf $(WHEELS)
	$(BIN)/maturin build --release --quiet --interpreter $(BIN)/python --out $(WHEELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --force-reinstall $(WHEELS)/*.whl
	@touch $@

build: $(STAMPS)/wheel

demo: build
	$(BIN)/torchrun --standalone --nproc-per-node=4 examples/ddp_digits.py --backend tpu_dist

test: build
	$(BIN)/python tools/check.py

lint: $(STAMPS)/requirements
	$(BIN)/python tools/check.py --only lint

bench: build
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench; done

clean:
	rm -rf target build $(VENV) .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
