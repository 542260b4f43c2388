# Each target does all its own set-up on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo results test lint type clean

demo: $(STAMP)
	$(BIN)/radical demo

# Every experiment on the embedded world, at the size of docs/results; goes on where it was stopped.
results: $(STAMP)
	for name in main ablation layers stages gap candidates similarity retrievers dynres composed transfer pareto \
	  cases; do $(BIN)/radical experiment $$name --out docs/results --limit 500 || exit 1; done
	$(BIN)/radical experiment diagnose --out docs/results --limit 100

test: lint type
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
