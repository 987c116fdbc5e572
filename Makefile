# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check install -c constraints.txt
CPU_TORCH := https://download.pytorch.org/whl/cpu

# Tests run on one process more than there are cores, as some wait for drives and other processes, and on four at most.
# Each begins with a part of its own, in order, since neighbours share what is slow to make; who ends first takes from
# the others. The slowest tests are shown at the end.
PARALLEL := -n $(shell nproc | awk '{print ($$1 < 4) ? $$1 + 1 : 4}') --dist worksteal --durations 20

.PHONY: install demo test test-all wheel publish-check gpu gpu-stand-in lint docs clean

install: $(STAMP)

# What users install, and what the demo runs: torch and `pagoda-train[train,plot]`. Without an NVIDIA GPU, torch is its CPU build, 0.2 GB in place of
# about 3; where PyTorch's index cannot be reached, the default build serves.
$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	nvidia-smi > /dev/null 2>&1 || $(PIP) --retries 0 --index-url $(CPU_TORCH) torch || true
	$(PIP) torch
	$(PIP) -e '.[train,plot]'
	touch $@

# The rest, for tests: trainers, linters, packages that tests compare with.
$(STAMP): $(CORE)
	$(PIP) -e '.[dev]'
	touch $@

# One minute: trains beyond RAM, is killed, resumes, and compares.
demo: $(CORE)
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -m 'not slow and not gpu' $(PARALLEL)

test-all: install
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m 'not gpu' $(PARALLEL)

# Builds the wheel, installs it into an environment of its own, and trains with it.
wheel: install
	$(BIN)/python -m pytest tests/test_wheel.py

# Before a release: builds, checks what the index shows, installs the wheel into a bare environment and trains there.
DIST ?= build/dist

publish-check: install
	$(PIP) --quiet build twine
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST)
	$(BIN)/twine check --strict $(DIST)/*
	$(BIN)/python tests/nightly/installs.py --wheel $(DIST)/*.whl -c constraints.txt

# On a machine with an NVIDIA GPU: its tests, then its benchmark. SSD=DIR names a directory on a fast drive.
GPU_RESULTS ?= benchmarks/results/gpu-$(shell hostname).json

gpu: install
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py $(if $(SSD),--ssd $(SSD)) --out $(GPU_RESULTS)

# The same tests without a GPU, on a stand-in for CUDA that finds races between streams; it needs a C++ compiler.
gpu-stand-in: install
	PYTHONPATH=tests $(BIN)/python -m pytest -p cuda_stand_in.plugin -m gpu -k 'not profile' tests/runtime/test_cuda.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in build/docs; a broken link is an error.
docs: install
	$(PIP) --quiet -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs build *.egg-info
