# Everything sets itself up: a bare machine needs Python 3.11+, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt

# uv does not read pip's settings; hand on an index and a folder of wheels where pip has them.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
# Falls back to pip where uv cannot install.
INSTALL = $(BIN)/uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS)
INSTALL_PIP = $(BIN)/pip install -q -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-oracle gpu-test gpu-bench gpu-tune static gpu-compiler gate lint format constraints clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit("moejax needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check uv

$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(BIN)/uv
	$(INSTALL) -e . || $(INSTALL_PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(INSTALL) -e '.[dev]' || $(INSTALL_PIP) -e '.[dev]'
	@touch $@

# pip takes torch, because it finds a CPU wheel on disk where the machine offers one.
$(VENV)/.oracle: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(INSTALL) -e '.[dev,oracle]' || $(INSTALL_PIP) -e '.[dev,oracle]'
	@touch $@

run: $(VENV)/.base ## Measure the shipped model: latency, throughput, quantization; tables, plots, result.json, W&B runs
	$(BIN)/python -m experiments.latency experiment=quick
	$(BIN)/python -m experiments.throughput experiment=quick_throughput
	$(BIN)/python -m experiments.quantization experiment=quick_quantization

# A shell that keeps Python from writing bytecode has each of the suite's many processes compile all that it imports
# anew, which is half of what most of them do: it is written then, but in the environment's folder alone.
ifdef PYTHONDONTWRITEBYTECODE
BYTECODE = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
endif

# Workers take whole files, which share engines and programs, the notebooks first: a long file at the end would leave
# the other worker idle. The second call runs what is marked `optimized`, with
# XLA's own optimisation; everything else compiles fast (tests/conftest.py). Both share one cache, removed at the end.
WORKERS ?= 2
PYTEST = $(BYTECODE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40
FAST := not slow and not gpu and not gate and not oracle
files_with = $$(grep -rlE --include='*.py' 'mark\.$(1)\b' tests)
define both_lanes
@export MOEJAX_TEST_CACHE=$$(mktemp -d); trap 'rm -rf "$$MOEJAX_TEST_CACHE"' EXIT; \
$(PYTEST) -m "$(1)" --nbmake --nbmake-timeout=600 notebooks tests; quick=$$?; \
$(PYTEST) -m "$(1)" --as-shipped $(call files_with,optimized); shipped=$$?; exit $$((quick || shipped))
endef

test: $(VENV)/.dev ## Fast tests and a notebook (no GPU, no network, no torch)
	$(call both_lanes,$(FAST))

test-slow: $(VENV)/.dev ## The long tests and all notebooks too
	$(call both_lanes,not gpu and not oracle)

test-oracle: $(VENV)/.oracle ## Compare with Hugging Face transformers (installs torch, CPU); SLOW=1: all parts of all cases
	$(PYTEST) -m "oracle$(if $(SLOW),, and not slow)" $(call files_with,oracle)

gpu-test: $(VENV)/.dev ## Tests that need a CUDA device; every kernel's contract, compiled, on inputs of its own each time
	@JAX_PLATFORMS=cuda $(BIN)/python -c 'import jax; jax.devices()' 2>/dev/null || \
	  { echo 'error: JAX sees no CUDA device here; install .[cuda13] or .[cuda12] on a CUDA machine' >&2; exit 2; }
	KERNEL_SEED=$${KERNEL_SEED:-$$(date +%s)} JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -m gpu

gpu-bench: $(VENV)/.dev ## Time every kernel beside other implementations on a CUDA device: results/<device>/
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m experiments.kernels mode=bench

gpu-tune: $(VENV)/.dev gpu-compiler ## Search the kernels' configurations on a CUDA device: pallas_kernels/data/<device>/
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m experiments.kernels mode=tune tune.data_dir=pallas_kernels/data

# Beside the environment, never in it: JAX would take the plugin for a GPU's. ptxas is what these wheels' users have.
GPU_COMPILER = .gpu-compiler/$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')
gpu-compiler: $(VENV)/.base ## XLA's GPU compiler, for kernels and programs on machines without a GPU (570 MB)
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	  test -d $(GPU_COMPILER)/jax_cuda12_pjrt-$$version.dist-info -a -d $(GPU_COMPILER)/nvidia || \
	  $(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target $(GPU_COMPILER) \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12==12.9.86

GATE = $(BYTECODE) $(BIN)/python -m experiments.program experiment=program_gate
static: $(VENV)/.dev gpu-compiler ## Compile every kernel and whole steps of models for A100 and H100, without a GPU: the gates
	$(BIN)/python -m experiments.kernels mode=static
	$(GATE) -m model=qwen3_30b_a3b,mixtral_8x7b,olmoe_1b_7b,deepseek_v2_lite target=a100,h100
	$(GATE) -m parallel=ep8,tp8,pp2_ep4
	$(GATE) -m quant=int4_rtn_g64,fp8_e4m3

gate: $(VENV)/.dev gpu-compiler ## The part of it that CI runs: two steps of Qwen3-30B-A3B for an A100, kernels beside them
	$(GATE) 'program.rows=[1]'
	$(BYTECODE) $(BIN)/python -m pytest -m "gate and not slow" $$(grep -rl --include='*.py' needs_gpu_compiler tests)

lint: $(VENV)/.dev ## What CI lints: ruff, mypy, import contracts (the pre-commit hooks)
	$(BIN)/pre-commit run --all-files --show-diff-on-failure --color never

format: $(VENV)/.dev ## Format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: | $(BIN)/uv ## Resolve constraints.txt anew, for all platforms and Pythons
	$(BIN)/uv pip compile --universal --upgrade --python-version 3.11 --quiet --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --extra dev --extra sweep --extra notebooks --extra ray pyproject.toml -o $(CONSTRAINTS)

clean: ## Remove what was built and measured
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf outputs multirun wandb
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
