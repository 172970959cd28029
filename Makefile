# Everything a newcomer needs: make demo, make test, make check, make bench; on a GPU make test-gpu, make soak.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One compute thread a process: pytest runs in parallel already.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: demo test test-gpu soak check bench clean

demo: $(VENV)/installed
	$(BIN)/outrider demo

test: $(VENV)/installed-dev
	$(TEST)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/test_cuda.py tests/test_device_driven.py tests/test_device_kernels.py \
		tests/test_device_experts.py

soak: $(VENV)/installed-dev
	$(BIN)/python tests/soak.py

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/outrider bench residency demo --threads 1

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo 'installing into $(VENV): torch is large, this takes from one minute to several'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed
