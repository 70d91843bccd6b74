# `make help` lists the targets. Every target makes the environment itself when it is missing.
# PY=python3 uses an environment of your own instead of .venv (it needs what requirements.txt names; for `book`, book/requirements.txt).

SHELL := /bin/sh
PY ?= .venv/bin/python
export HF_HUB_DISABLE_TELEMETRY = 1
export PYTHONPATH := $(if $(filter .venv/bin/python,$(PY)),,$(CURDIR)/src$(if $(PYTHONPATH),:))$(PYTHONPATH)
ENVIRONMENT := $(if $(filter .venv/bin/python,$(PY)),.venv/ready,)
READING := $(ENVIRONMENT:ready=reading)
PARALLEL := --dist loadfile --no-loadscope-reorder
SOURCES := $(shell find src -name '*.py' -o -name '*.json.gz')

.PHONY: help book test check lab attack bench frontier gpu notebooks clean
.DEFAULT_GOAL := help

help: ## list the targets
	@echo "make TARGET, where TARGET is"
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' Makefile | expand -t 14

book: $(READING) _build/fresh ## build the book at _build/html, with the notebooks' recorded outputs
	@$(PY) tools/build_book.py

# Three processes also on two cores: notebooks and tests sleep for much of their time, to keep a pace.
test: $(ENVIRONMENT) ## everything that CI runs: style, unit tests, notebooks, the book
	@echo "== style and types"
	@$(PY) -m ruff check --quiet . && $(PY) -m ruff format --check --quiet . && $(PY) -m mypy --no-error-summary
	@echo "== tests, notebooks and book (a test a dot; about a quarter of an hour on two cores)"
	@HF_HUB_OFFLINE=1 $(PY) -m pytest notebooks tests --nbval --nbval-sanitize-with tests/nbval.cfg -m "not long" -n 3 $(PARALLEL) --durations=15

check: $(ENVIRONMENT) ## the quick part of the tests: style, types and everything without processes
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy
	@$(PY) -m pytest tests -m "not slow and not long" -n 2 $(PARALLEL)

lab: $(ENVIRONMENT) ## open the notebooks in JupyterLab
	@$(PY) -m jupyter lab --LabApp.default_url=/lab/tree/notebooks

attack: $(ENVIRONMENT) ## break what can be broken, far more often than the tests do; write results/attacks.json (some twenty minutes)
	@HF_HUB_OFFLINE=1 $(PY) -m pytest tests -m long
	@HF_HUB_OFFLINE=1 $(PY) tools/attack.py
	@HF_HUB_OFFLINE=1 $(PY) tools/mutate.py

bench: $(ENVIRONMENT) ## measure the simulator, the runtime against PyTorch's, and this machine's cores; write results/<processor>.json (minutes)
	@$(PY) benchmarks/bench.py
	@$(PY) benchmarks/gpu.py --device cpu --size cores --only stages predicted runs

frontier: $(ENVIRONMENT) ## search for the shortest order in every memory limit; write results/frontier.json (a minute for each that is open: an hour or two)
	@$(PY) benchmarks/frontier.py

gpu: $(ENVIRONMENT) ## on a GPU box: check and measure the runtime on CUDA, write results/<device>.json (DEADLINE=540: in so many seconds; ONLY=smoke: that part)
	@$(PY) benchmarks/gpu.py $(if $(DEADLINE),--deadline $(DEADLINE)) $(if $(ONLY),--only $(ONLY))

notebooks: $(ENVIRONMENT) ## execute the notebooks in place and record their outputs, on a machine that does nothing else
	@$(PY) tools/execute_notebooks.py

clean: ## remove the book and the caches, keep the environment
	rm -rf _build .pytest_cache .ruff_cache

# What the pages with code import, or the recordings that they show, have changed: execute these pages again.
_build/fresh: $(SOURCES) $(wildcard results/*.json) requirements.txt
	@rm -rf _build/.jupyter_cache
	@mkdir -p _build && touch _build/fresh

# What runs the course, beside what reads it.
.venv/ready: .venv/reading
	@echo "== completing the environment in .venv (a minute or some; torch is large)"
	@.venv/bin/python tools/install.py requirements.txt
	@touch .venv/ready

.venv/reading: book/requirements.txt requirements.txt pyproject.toml
	@python=; for candidate in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; \
	  then python="$$candidate"; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "pplab needs Python 3.11 to 3.14, and python3 is `python3 --version 2>&1`." \
	    "Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	echo "== making the environment in .venv with `"$$python" --version`"; \
	"$$python" -m venv .venv
	@.venv/bin/python tools/install.py book/requirements.txt
	@.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch .venv/reading
