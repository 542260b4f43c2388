# Each target does all its own set-up on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LINTER := $(VENV)/.linter
BROWSER := $(VENV)/.browser
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo results results-photos bench fuzz test coverage test-fast test-all lint type docs wheel-test browser clean

demo: $(STAMP)
	$(BIN)/radical demo

# Every experiment on the embedded world, at the sizes of docs/results; goes on where it was stopped. The tables
# there were made with one seed; without --seeds an experiment runs the paper's five.
SEEDS := 42
LISTS := main:500 ablation:500 dynres:500 similarity:150 layers:500 stages:500 gap:200 transfer:200 \
  retrievers:120 composed:60 candidates:100 pareto:100 diagnose:100 cases:6 costs:500 promise:2000
TIGHT := ablation:500 main:150 layers:120 stages:120 gap:120
results: $(STAMP)
	for item in $(LISTS); do \
	  $(BIN)/radical experiment $${item%:*} --limit $${item#*:} --seeds $(SEEDS) --out docs/results || exit 1; done
	for item in $(TIGHT); do case $$item in main:*) keep="0.05 0.02";; *) keep=0.02;; esac; \
	  $(BIN)/radical experiment $${item%:*} --limit $${item#*:} --keep $$keep --seeds $(SEEDS) \
	    --out docs/results/tight || exit 1; done
	$(BIN)/radical experiment costs --limit 2000 --keep 0.2 0.15 --seeds $(SEEDS) --out docs/results/tight
	$(BIN)/radical experiment position --limit 50 --keep 1.0 0.2 0.02 --seeds $(SEEDS) --out docs/results
	$(BIN)/radical experiment nucleus --limit 500 --keep 0.1 0.05 0.02 --seeds $(SEEDS) --out docs/results

# The experiments on photographs: make results-photos DATA=FOLDER_OF_FLICKR8K. The pictures of `cases` show them, so they
# are not committed.
ON_PHOTOS = $(BIN)/radical experiment $(1) --testbed photos --data $(DATA) --out docs/results/photos$(2)
PHOTOS := main:500 ablation:40 layers:20 similarity:20 diagnose:4 candidates:8 pareto:8 cases:4
results-photos: $(STAMP)
	for item in $(PHOTOS); do \
	  $(call ON_PHOTOS,$${item%:*} --limit $${item#*:} --seeds $(SEEDS)) || exit 1; done
	$(call ON_PHOTOS,main --limit 20 --keep 0.2 0.1 0.05 0.02,/seeds)
	$(call ON_PHOTOS,main --limit 60 --seeds $(SEEDS) --pools,/pools)

# The figures of docs/performance.md.
bench: $(STAMP)
	$(BIN)/radical bench prefill --keep 0.2 0.1 --rounds 7
	$(BIN)/radical bench end-to-end
	$(BIN)/radical bench end-to-end --shape paper --width 256 --rounds 1
	$(BIN)/radical bench throughput
	$(BIN)/radical bench service
	$(BIN)/radical bench attacks

# Schemathesis against the service, more than 2,000 cases.
fuzz: $(STAMP)
	RADICAL_SCHEMA_CASES=500 $(BIN)/python -m pytest -q tests/service/test_schema.py

# Fast tests, and slow ones of small models, run in two processes of one thread. Those that train, serve or measure time run
# in one process with all cores.
FAST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n 2
TINY := $(addprefix tests/,backbones method pruning reranking integrations cli \
  $(addprefix lab/test_,commands.py costs.py experiments.py own_lists.py promise.py))
SLOW_TINY := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow -n 2 $(TINY)
SLOW := $(BIN)/python -m pytest -q -m slow $(addprefix --ignore=,$(TINY))

# Everything that must pass. Coverage is that of the fast tests: measuring it slows the others down.
test: lint type docs browser
	$(FAST) --cov --cov-report=term
	$(SLOW_TINY)
	$(SLOW)

# The coverage of all tests.
coverage: $(STAMP) browser
	$(FAST) --cov --cov-report=
	$(SLOW_TINY) --cov --cov-append --cov-report=
	$(SLOW) --cov --cov-append --cov-report=term

# The tests that take a moment each.
test-fast: $(STAMP)
	$(FAST)

# And the adapter whose library, with all that it asks for, is larger than the rest together. Its own parts are enough
# for the test; what else it asks for (torchvision among it) need not load beside this torch.
test-all: test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps lmms-eval loguru pytz
	$(BIN)/python -m pytest -q tests/integrations

# Needs the linter alone.
lint: $(LINTER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

# The documentation site, in site/. A warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The built wheel in an empty environment without extras: it must rank, prune and show every --help.
wheel-test:
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps -w build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt torch
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/python ../../tests/wheel.py *.whl

$(VENV):
	$(PYTHON) -m venv $(VENV)

$(LINTER): constraints.txt | $(VENV)
	$(PIP) ruff
	touch $@

$(STAMP): pyproject.toml constraints.txt | $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

# A browser for the tests of the page: the system's package where this user may install it, else Playwright's own.
# Without either the tests still run, and say that they skip the page; under CI=true they fail.
browser: $(BROWSER)

$(BROWSER): $(STAMP)
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then touch $@; \
	elif command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || sudo -n true 2>/dev/null; } \
	  && as=$$([ "$$(id -u)" = 0 ] || echo sudo -n) && $$as apt-get update -qq \
	  && $$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; then touch $@; \
	elif $(BIN)/python -m playwright install chromium; then touch $@; \
	else echo "no browser could be installed: the tests of the page will not run" >&2; fi

clean:
	rm -rf $(VENV) demo site build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
