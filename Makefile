# The doors of the house. Each target is a script in ci/ that anyone can run by hand.
MODEL ?= examples/tiny-llama
ARGS ?=

.PHONY: up test test-faults test-grid check bench install

up:  ## serve MODEL with a prefill instance, a decode instance and a proxy; Ctrl-C stops all
	@ci/install
	@exec .venv/bin/mooncake-engine up --model $(MODEL) $(ARGS)

test:  ## all tests that need no accelerator
	@ci/install dev
	@ci/test-cpu $(ARGS)

test-faults:  ## everything that can go wrong, then a soak; ARGS=--full makes it 5,000 requests
	@ci/install dev
	@.venv/bin/python ci/test_faults.py $(ARGS)

test-grid:  ## every pair of tensor-parallel sizes, both connectors; hours on a small machine
	@ci/install dev
	@.venv/bin/python ci/test_grid.py $(ARGS)

check:  ## lint, types, architecture, versions
	@ci/install dev
	@ci/check

bench:  ## speed, side by side with transformers; one line per figure, exit 0 only if all hold
	@ci/install dev
	@.venv/bin/python ci/bench.py $(ARGS)

install:  ## .venv with everything that tests and checks need
	@ci/install dev
