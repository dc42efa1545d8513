# Each target works on a machine that has only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
# Of the tests; most of their time is waiting.
PROCESSES ?= 3
BIN := $(VENV)/bin

.PHONY: demo test crash check clean
.DEFAULT_GOAL := test

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadscope

crash: $(VENV)/installed
	$(BIN)/python -m tests.syscalls
	$(BIN)/python -m tests.power --images 2000
	$(BIN)/python -m tests.matrix

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples bench
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist
