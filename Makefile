# Every target sets up what it needs in a virtual environment of its own, once: the stamps say what is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most modules of what is installed are never imported, so each is compiled when it is first imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt

# If it were set, each of the many interpreters that tests start would compile all modules of this package anew.
unexport PYTHONDONTWRITEBYTECODE

# Files or folders: `make test-multi TESTS=tests/launch` runs fewer.
TESTS ?= tests
# The tests that `make test-nccl` runs, by their mark: each_kind or multiprocess.
KINDS ?= each_kind
# Of one process, and dependent on the instructions with which the processor computes: numbers, and memory of kernels.
OF_PROCESSOR := tests/models tests/cost/test_memory.py $(addprefix tests/worker/test_,worker_memory.py \
	profiling_layers.py split_backward.py float32_modules.py precision.py recompute.py executor.py)

.PHONY: help setup train test test-single test-multi test-nccl test-avx2 test-paced explore golden sequences check

help:
	@echo "make train      train a small model on this machine, through two failures"
	@echo "make test       run all tests: those of test-single, in one process each, of test-multi and of test-nccl"
	@echo "make test-nccl  run a test of each kind of failure over a pretended NCCL; KINDS=multiprocess: all that train"
	@echo "make test-avx2  run the tests that depend on the processor as on one without AVX-512"
	@echo "make test-paced run the tests of worker processes at several paces, and beside a load"
	@echo "make explore    run the tests of one process with examples that are drawn anew"
	@echo "make golden     rewrite the outputs and messages that tests compare, those of TESTS"
	@echo "make sequences  train through 50 drawn sequences of failures, and check each"
	@echo "make check      check format, lint and types"
	@echo "make setup      only install everything into $(VENV)"

setup: $(VENV)/.with-dev

train: $(VENV)/.with-package
	$(BIN)/chameleon train examples/quickstart.toml

test: $(VENV)/.with-dev
	.ci/parts test-single test-multi test-nccl

test-single: $(VENV)/.with-dev
	$(BIN)/python -m pytest -m "not multiprocess" --numprocesses auto --dist worksteal $(TESTS)

test-avx2: $(VENV)/.with-dev
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
		$(BIN)/python -m pytest -m "not multiprocess" --numprocesses auto --dist worksteal $(OF_PROCESSOR)

test-paced: $(VENV)/.with-dev
	.ci/paces

# Two at a time, however many cores: these start a process for each worker, most of which wait for each other. The files
# in the order of tests/conftest.py: pytest-xdist would begin with those that have most tests.
test-multi test-nccl: WORKERS = --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 8

test-multi: $(VENV)/.with-dev
	$(BIN)/python -m pytest -m multiprocess $(WORKERS) \
		$$(grep -rl mark.multiprocess $(TESTS) --include='test_*.py' | sort)

test-nccl: $(VENV)/.with-dev
	$(BIN)/python -m pytest --backend pretended-nccl -m $(KINDS) $(WORKERS) \
		$$(grep -rl mark.$(KINDS) $(TESTS) --include='test_*.py' | sort)

explore: $(VENV)/.with-dev
	$(BIN)/python -m pytest -m "not multiprocess" --numprocesses auto --dist worksteal --hypothesis-profile=explore

golden: $(VENV)/.with-dev
	CHAMELEON_GOLDEN=write $(BIN)/python -m pytest -q -m "not multiprocess" -p no:xdist \
		$$(grep -rl 'tests.golden' $(TESTS) --include='test_*.py' | sort)

check: $(VENV)/.with-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

sequences: $(VENV)/.with-dev
	$(BIN)/python -m benchmarks.sequences --runs 50 --seed 0

$(VENV)/.with-package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# The build backend first, so that its version is pinned like all others.
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.with-dev: $(VENV)/.with-package
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@
