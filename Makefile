# The daily commands. `make` alone lists them.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup serve test check format mutants protos docs bench bench-engine bench-speculation chaos soak gpu-check containers clean distclean

# What `make serve` serves: MODEL=<folder, .gguf file or hub id>  WORKERS=2  DRAFT=<auto|folder|ngram|none>
MODEL ?= default
WORKERS ?= 1
DRAFT ?= auto
PORT ?= 50051
DTYPE ?=
ARGS ?=
# How many processes run the tests; 0: this one alone, as debuggers want it.
JOBS ?= 2
# How long `make soak` goes on.
MINUTES ?= 60

CODE := gateway scheduler worker draft_worker drafting cluster engine distill cli tandem_client bench deploy examples/python tests hatch_build.py

# The first Python from 3.11 on; PYTHON=… overrides.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$python; break; }; done)
endif

help: ## list the commands
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20
	@echo
	@echo 'make serve MODEL=<folder|file.gguf|hub id> WORKERS=2 DRAFT=<auto|folder|ngram|none> PORT=50051 DTYPE=float32'
	@echo 'make test ARGS="tests/cluster -k config"'

setup: ## make .venv, install, generate the stubs; a second run takes no time
	@test -n '$(PYTHON)' || { echo 'setup: Python 3.11 or newer is needed and was not found; \
	for instance: sudo apt install python3 python3-venv, or make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@'$(PYTHON)' -c '$(NEW_ENOUGH)' || { echo "setup: $(PYTHON) is $$('$(PYTHON)' --version 2>&1); \
	Python 3.11 or newer is needed" >&2; exit 1; }
	@'$(PYTHON)' deploy/setup_venv.py

serve: setup ## start a cluster on this machine, show a completion, serve until Ctrl-C
	@.venv/bin/tandem up --demo --model '$(MODEL)' --workers '$(WORKERS)' --draft '$(DRAFT)' --port '$(PORT)' \
	  $(if $(DTYPE),--dtype '$(DTYPE)') $(ARGS)

test: setup ## run every test; ARGS goes to pytest, JOBS=0 for one process
	@.venv/bin/python -m pytest -n '$(JOBS)' --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup ## lint, format, types, protos
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(CODE)
	.venv/bin/buf lint
	@tag="$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)"; \
	if [ -n "$$tag" ]; then echo "buf breaking against $$tag"; .venv/bin/buf breaking --against ".git#tag=$$tag"; \
	else echo 'buf breaking: no release yet to compare with'; fi

format: setup ## put the code into the one format
	.venv/bin/ruff check --fix --quiet . || true
	.venv/bin/ruff format .

mutants: setup ## plant faults one at a time; each must turn a test red
	@.venv/bin/python tests/mutants/run.py $(ARGS)

protos: setup ## generate the stubs anew
	@.venv/bin/python hatch_build.py

docs: setup ## write the generated pages of docs anew
	@.venv/bin/python tests/test_docs.py

bench: setup ## CPU cost of the scheduler's core; for a running cluster see `tandem bench --help`
	@.venv/bin/python -m bench.scheduler_core $(ARGS)

bench-engine: setup ## the engine alone: step times beside the machine's floors; ARGS='--rows 1,8'
	@.venv/bin/python -m bench.engine $(ARGS)

bench-speculation: setup ## does speculation pay? Pairs with and without drafts; ARGS='--quick' or '--draft FOLDER'
	@.venv/bin/python -m bench.speculation $(ARGS)

chaos: setup ## every fault of every process under every load, by the fake engine and a real one; about an hour
	@.venv/bin/python -m tests.chaos.run everything $(ARGS)
	@TANDEM_CHAOS_TIMED=1 .venv/bin/python -m pytest -q tests/chaos/test_namespaces.py

soak: setup ## random faults for so long; MINUTES=60, ARGS='--seed 1'
	@.venv/bin/python -m tests.chaos.run soak --minutes '$(MINUTES)' $(ARGS)

gpu-check: setup ## on a machine with a GPU: is its path right and fast? Minutes; ARGS='--json found.json'
	@.venv/bin/python -m bench.gpu_check $(ARGS)

containers: setup ## build the images and try compose.yaml for real; ARGS='-k fake' without weights
	@.venv/bin/python -m pytest tests/containers -m containers -p no:cacheprovider $(ARGS)

clean: ## remove caches and generated files; .venv and fetched models stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
	find protos -name '*_pb2*.py*' -delete

distclean: clean ## remove .venv and .cache too
	rm -rf .venv .cache
