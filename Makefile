# `make demo` and `make test` are all that a newcomer needs; both set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= cpu
BIN = $(VENV)/bin

.PHONY: help install demo test test-slow test-gpu fuzz audit docs lint format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'EXTRA=gpu installs faiss-gpu instead of faiss-cpu; VENV=DIR uses another environment.'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# A marker per set of extras, renewed when the dependencies change.
$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	@# faiss-cpu and faiss-gpu overwrite each other: never both in one environment.
	if ls $(VENV)/installed-* 2>/dev/null | grep -qv -e '-$(EXTRA)$$' -e '-$(EXTRA)-'; then \
		$(BIN)/python -m pip uninstall -q -y faiss-cpu faiss-gpu; rm -f $(VENV)/installed-*; fi
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(subst -,$(comma),$*)]'
	@touch $@
comma = ,

install: $(VENV)/installed-$(EXTRA)  ## create .venv and install the package into it

demo: install  ## train on the embedded data set (a minute or two on 2 cores)
	$(BIN)/python src/train.py

test: $(VENV)/installed-$(EXTRA)-test  ## run the tests (about 6 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n auto --dist loadfile --no-loadscope-reorder --durations=10

test-slow: $(VENV)/installed-$(EXTRA)-test  ## run the long tests: kills, signals, several processes, notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# Installs nothing and needs no network. Tests whose packages are missing (hydra-core, pytorch-metric-learning) are errors.
test-gpu:  ## run the tests of NVIDIA GPUs with PYTHON as it is; adds a row to benchmarks/results/test_gpu.jsonl
	$(PYTHON) -m pytest -m gpu --continue-on-collection-errors --record=benchmarks/results/test_gpu.jsonl \
		$$(grep -rl 'mark\.gpu' tests --include='test_*.py')

fuzz: $(VENV)/installed-$(EXTRA)-test  ## run each fuzzing test with 10,000 cases (FUZZ_EXAMPLES=N for others)
	OMP_NUM_THREADS=1 FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-10000} $(BIN)/python -m pytest -n auto tests/test_fuzz.py

docs: $(VENV)/installed-$(EXTRA)-docs  ## make a site of README, docs/ and notebooks/ in site/html; a broken link fails
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . site/html

# Strict: pip-audit alone exits with 0 where the advisories cannot be looked up. Local versions (2.11.0+cpu) are none of PyPI's.
audit: $(VENV)/installed-$(EXTRA)-audit  ## ask PyPI for known vulnerabilities of the installed packages (needs the network)
	$(BIN)/python -m pip list --format=freeze --exclude-editable | sed 's/+[^=]*$$//' \
		| $(BIN)/python -m pip_audit --strict --disable-pip --no-deps --progress-spinner off -r /dev/stdin

lint: $(VENV)/installed-$(EXTRA)-lint  ## check format, style and types
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(VENV)/installed-$(EXTRA)-lint  ## rewrite the files in the house format
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:  ## remove caches and the virtual environment; data/ and runs/ stay
	rm -rf site $(VENV) .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info
