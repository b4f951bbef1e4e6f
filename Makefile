# Thin wrappers; README.md shows the plain pip and pytest commands.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test exhaustive lint bench clean

demo: $(STAMP)
	$(VENV)/bin/python examples/serve_checkpoint.py

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# what `make test` leaves out; .ci/run has both
exhaustive: $(STAMP)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m exhaustive

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
