# Two commands do everything: `make demo` shows it, `make test` checks it. Both set up what they need by themselves.
SHELL := bash
.DELETE_ON_ERROR:
.PHONY: demo paper private-run docs test system-test lint types tests mutants chromium format install clean help constraints check-install dist notebooks deployment-test

VENV := .venv
BIN := $(VENV)/bin
# The first Python from 3.11 to 3.14.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
# CI also runs what needs Spark, Hugging Face models, Flower, MLflow or a browser; elsewhere those tests skip and say so. (`make test EXTRAS=dev,spark,hub,llm,flower,mlflow,browser` for all of it.)
EXTRAS ?= $(if $(CI),dev$(comma)spark$(comma)hub$(comma)llm$(comma)flower$(comma)mlflow$(comma)browser,dev)
comma := ,

help:  ## What there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(VENV)/.installed  ## Train with and without privacy on a small real corpus, and compare (a few minutes)
	$(BIN)/unheard demo

paper: $(VENV)/.installed  ## Rebuild every table and figure of the paper, and one page, from reproduction/results/ (40 s of processor time)
	$(BIN)/python -m reproduction page --results reproduction/results --out build/paper

docs: $(VENV)/.installed-docs  ## Build the documentation site into build/site, in strict mode, without the network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.installed-notebooks  ## Run the notebooks of examples/notebooks from their first cell to their last (1 to 2 minutes)
	OMP_NUM_THREADS=2 $(BIN)/python tools/run_notebooks.py

private-run: $(VENV)/.installed  ## The private run on 750,947 users: DATA=folder with reviews_81.jsonl.zst and blogs_1600.jsonl.zst (one GPU)
	@test -n "$(DATA)" || { echo "Name the folder of the corpora: make private-run DATA=/path/to/corpora"; exit 2; }
	$(BIN)/python -m reproduction.private_run prepare --data $(DATA) --work runs/private-run
	$(BIN)/python -m reproduction.private_run all --work runs/private-run
	$(BIN)/python -m reproduction.private_run collect --work runs/private-run --out runs/private-run/results

test: lint types tests  ## Lint, types and the test suite (about 5 minutes on 2 cores)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright

tests: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not system"

system-test: $(VENV)/.installed $(if $(CI),chromium)  ## Tests that start other programs (browsers, Spark, Flower, killed commands), and those of the reproduction
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m system

chromium:  ## Chromium for the tests of pages, from Debian (as root), unless there is one
	@command -v chromium >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

mutants: $(VENV)/.installed  ## Break the code in more than 1,100 ways and show that a test fails for each (20 to 40 minutes)
	$(BIN)/python -m tests.mutants.run

format: $(VENV)/.installed  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed  ## Only set up .venv

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Unheard needs Python 3.11, 3.12, 3.13 or 3.14; none was found. Install one, or name it: make PYTHON=/path/to/python"; exit 2; }
	@echo "Installing into $(VENV). PyTorch with CUDA is several GB: this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

$(VENV)/.installed-flower: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[flower]"
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[notebooks,hf,demo]"
	@touch $@

deployment-test: $(VENV)/.installed-flower  ## Run the Flower apps with a SuperLink and SuperNodes on loopback: TLS, authenticated nodes (1 to 2 minutes)
	OMP_NUM_THREADS=1 UNHEARD_DEPLOYMENT_TEST=1 $(BIN)/python -m pytest tests/federated/test_deployment.py

constraints: $(VENV)/.installed  ## Pin every package of every extra anew, for all supported Pythons, from the package index
	UV_NO_CONFIG=1 $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade --no-annotate \
		--custom-compile-command 'make constraints' pyproject.toml constraints.in --output-file constraints.txt

check-install:  ## Resolve all extras from a plain package index with every supported Python on this machine
	tools/check_install.sh

dist: $(VENV)/.installed  ## Build the wheel and the sdist, and check both
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

clean:  ## Remove .venv; corpora and runs stay
	rm -rf $(VENV)
