# The doors of the house. Each target is a script in ci/ that anyone can run by hand.
MODEL ?= examples/tiny-llama
ARGS ?=

.PHONY: up test check bench install

up:  ## serve MODEL with a prefill instance, a decode instance and a proxy; Ctrl-C stops all
	@ci/install
	@exec .venv/bin/mooncake-engine up --model $(MODEL) $(ARGS)

test:  ## all tests that need no accelerator
	@ci/install dev
	@ci/test-cpu $(ARGS)

check:  ## lint, types, architecture, versions
	@ci/install dev
	@ci/check

bench:  ## speed, side by side with transformers; one line per figure, exit 0 only if all hold
	@ci/install dev
	@.venv/bin/python ci/bench.py $(ARGS)

install:  ## .venv with everything that tests and checks need
	@ci/install dev
