# Everything runs from .venv, which `setup` makes with nothing but Python 3.11 and pip.
VENV := .venv
BIN := $(VENV)/bin
# The Triton of GPU hosts with torch 2.11, for ahead-of-time compilation beside the pinned one.
TRITON_3_6 := .triton-3.6

.PHONY: setup demo test check bench gpu profiles validation kernels-table

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dashboard,dev,import,kernels]'
	touch $@

demo: setup
	$(BIN)/tonnage memory kimi-k2.6-h200
	$(BIN)/tonnage simulate kimi-k2.6-h200
	$(BIN)/tonnage simulate mooncake-trace

$(TRITON_3_6)/.done: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --upgrade --target $(TRITON_3_6) triton==3.6.0 numpy==2.3.5
	touch $@

test: check $(TRITON_3_6)/.done
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/engine.py

# At most 12 minutes on a GPU, in parts that a kill does not undo; `out/session-cuda/report.md`.
gpu: setup
	$(BIN)/python benchmarks/gpu_session.py

# The shipped profiles, from the installed aiconfigurator-core (extra `import`), and what they miss.
profiles: setup
	$(BIN)/python -m tonnage.calibrate.build
	$(BIN)/python -m tonnage.calibrate.validate

# The table of docs/kernels.md: whatever changed since is compiled, for both releases of Triton.
kernels-table: setup $(TRITON_3_6)/.done
	$(BIN)/python -m tonnage.kernels.compile --write
	$(BIN)/python -m tonnage.kernels.compile --write --triton-path $(TRITON_3_6)

validation: setup
	$(BIN)/python -m tonnage.calibrate.validate
