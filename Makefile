# Everything runs from .venv, which `setup` makes with nothing but Python 3.11 and pip.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check bench profiles validation

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,import]'
	touch $@

demo: setup
	$(BIN)/tonnage memory kimi-k2.6-h200
	$(BIN)/tonnage simulate kimi-k2.6-h200
	$(BIN)/tonnage simulate mooncake-trace

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/engine.py

# The shipped profiles, from the installed aiconfigurator-core (extra `import`), and what they miss.
profiles: setup
	$(BIN)/python -m tonnage.calibrate.build
	$(BIN)/python -m tonnage.calibrate.validate

validation: setup
	$(BIN)/python -m tonnage.calibrate.validate
