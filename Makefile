# TORCH chooses the torch requirement. Default: PyPI's build (CUDA on Linux).
# CPU only, smaller: pip install torch from the CPU index into .venv first, or TORCH=torch==2.13.0 with a CPU wheel at hand.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11
CUDA_PINS ?=
BIN := $(VENV)/bin

.PHONY: demo test lint modelcheck clean

demo: $(VENV)/.demo
	$(BIN)/torch-kda demo

test: $(VENV)/.dev
	$(BIN)/pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# 10 million transitions and more: an hour of two cores. Goes on where it was stopped.
modelcheck: $(VENV)/.dev
	nice -n 15 $(BIN)/python -m torch_kda.tests.modelcheck

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -U pip

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[plots]"
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/pip install -q "$(TORCH)" $(CUDA_PINS)
	$(BIN)/pip install -q -e ".[cuda,dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info
