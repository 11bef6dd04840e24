# Each target prepares the environment that it needs; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the oldest supported versions get an environment of their own; Python 3.10 or 3.11, which they were built for
OLDEST := .venv-oldest
OLDEST_PYTHON ?= $(PYTHON)
# so do JAX and imitation, which are large and make test skips
INTEGRATIONS := .venv-integrations
# and the environments whose observations benchmarks replay, which pin their own MuJoCo
STREAMS := .venv-streams
# and Reverb, which needs TensorFlow 2.15 and Python 3.11 or older
REVERB := .venv-reverb
REVERB_PYTHON ?= $(PYTHON)
# and the libraries that benchmarks.peers compares; one of them has this library's import name, so it gets a folder
PEERS := .venv-peers
# tests that must pass without any optional package
MINIMAL := $(wildcard tests/codecs tests/kernels tests/stores tests/compressed tests/public_api tests/files tests/cli \
	tests/recording tests/vec_buf tests/training_utils)
# one thread per process: two processes already use both cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-integrations check types bench streams reverb peers docs torture format clean

help:
	@echo "make demo               train an agent on an Atari game with SB3's buffer and with a compressed one"
	@echo "make test               run the tests, with every optional package and then with none"
	@echo "make test-oldest        run the tests with the oldest supported versions of all dependencies"
	@echo "make test-integrations  run the recipes of docs/integrations.md, with SBX and imitation"
	@echo "make check              lint, check formatting and types, run the tests"
	@echo "make torture            interrupts, failed allocations, forged and damaged files, kills: the long form"
	@echo "make bench              run the benchmarks and render docs/ from the results"
	@echo "make streams            record observations of other environments for the benchmarks"
	@echo "make reverb             install Reverb, which benchmarks.service then measures too"
	@echo "make peers              install other replay buffers, which benchmarks.peers compares with this one"
	@echo "make docs               render docs/ from the committed results and build the site"

$(READY): pyproject.toml constraints.txt
	@echo "installing every optional package in $(VENV): a few minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[fast,extra,contrib,convert,gpu,ray,vizdoom,zoo,docs,dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(PYTEST) -m "not long"
	# zarr installs a pytest plugin, which would import it although tests/no_extras hides it
	PYTHONPATH=tests/no_extras $(PYTEST) -m "not long and not same_without_extras" -p no:zarr $(MINIMAL)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[fast,extra,contrib,convert,vizdoom]' \
		hypothesis psutil pytest pytest-xdist
	touch $@

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 -q -m "not long and not gpu" $(MINIMAL) tests/gpu_buffers

$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install -q -c constraints.txt -e '.[fast,extra,contrib,torchrl,zoo,sbx]' pytest \
		datasets sacred scikit-learn seals
	# its own requirements are SB3 2.2 and Gymnasium 0.29
	$(INTEGRATIONS)/bin/python -m pip install -q --no-deps imitation==1.0.1
	touch $@

test-integrations: $(INTEGRATIONS)/.ready
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -q tests/integrations \
		'tests/test_examples.py::test_examples_run[example_sbx]'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy uses one core only
	$(MAKE) -j 2 types test

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.render
	$(BIN)/python scripts/fit_heap_heuristic.py --write

$(STREAMS)/.ready: pyproject.toml
	test -x $(STREAMS)/bin/python || $(PYTHON) -m venv $(STREAMS)
	$(STREAMS)/bin/python -m pip install -q -e '.[streams]'
	touch $@

streams: $(STREAMS)/.ready
	$(STREAMS)/bin/python -m benchmarks.streams

$(REVERB)/.ready:
	test -x $(REVERB)/bin/python || $(REVERB_PYTHON) -m venv $(REVERB)
	$(REVERB)/bin/python -m pip install -q 'dm-reverb==0.14.*' 'tensorflow==2.15.*'
	touch $@

reverb: $(REVERB)/.ready

$(PEERS)/.ready: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -c constraints.txt -e '.[fast,extra,torchrl]' cpprb==11.0.0 flashbax==0.1.3 \
		rlox==1.2.0 scikit-video zstd
	$(PEERS)/bin/python -m pip install -q --no-deps --upgrade --target $(PEERS)/pypi sb3-extra-buffers==0.5.0
	touch $@

# Reverb needs an older Python than the others; benchmarks.peers says so where it is missing
peers: $(READY) $(PEERS)/.ready
	-$(MAKE) reverb && $(REVERB)/bin/python -m pip install -q -c constraints.txt psutil stable-baselines3
	$(PEERS)/bin/python -m benchmarks.streams video

docs: $(READY)
	$(BIN)/python -m benchmarks.render
	$(BIN)/python scripts/fit_heap_heuristic.py --write
	$(BIN)/python -m benchmarks.envs --render
	$(BIN)/python -m benchmarks.doom_memory --render
	$(BIN)/python -m benchmarks.torchrl --render
	$(BIN)/python -m benchmarks.sequences --render
	$(BIN)/python -m benchmarks.service --render
	$(BIN)/python -m benchmarks.shared_memory --render
	$(BIN)/python -m benchmarks.desktop --render
	$(BIN)/python -m benchmarks.pong
	$(BIN)/python -m benchmarks.agents --render
	$(BIN)/python -m benchmarks.peers --render
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

torture: $(READY)
	$(BIN)/python -m tests.torture
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m long tests

clean:
	rm -rf $(VENV) $(OLDEST) $(INTEGRATIONS) $(STREAMS) $(REVERB) $(PEERS) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
