# make demo | test | check | bench | docs: each prepares the environment it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# what must work with none of the optional packages installed
MINIMAL := $(wildcard tests/codecs tests/kernels tests/stores tests/compressed tests/public_api tests/files tests/cli \
	tests/recording tests/vec_buf tests/training_utils)
# two processes share the cores already. zarr comes with a plugin, by which pytest would find it though it is hidden
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m "not long"

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs torture format clean

help:
	@echo "make demo    train an agent on a real Atari game, beside SB3's own buffer"
	@echo "make test    the tests, with every optional package and then with none"
	@echo "make check   lint, format, types and the tests"
	@echo "make torture interrupt, starve, forge, damage and kill, again and again"
	@echo "make bench   measure, then write docs/ from the measurements"
	@echo "make docs    write docs/ from the measurements already made, and build site/ from it"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[fast,extra,contrib,convert,gpu,ray,vizdoom,docs,dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(PYTEST)
	PYTHONPATH=tests/no_extras $(PYTEST) -p no:zarr $(MINIMAL)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.render
	$(BIN)/python scripts/fit_heap_heuristic.py --write

docs: $(READY)
	$(BIN)/python -m benchmarks.render
	$(BIN)/python scripts/fit_heap_heuristic.py --write
	$(BIN)/python -m benchmarks.envs --render
	$(BIN)/python -m benchmarks.doom_memory --render
	$(BIN)/python -m benchmarks.torchrl --render
	$(BIN)/python -m benchmarks.pong --render
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

torture: $(READY)
	$(BIN)/python -m tests.torture
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m long tests

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
