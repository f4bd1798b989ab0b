# Everything that is done with this repository. `make` alone lists it.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-lock
LOCK := requirements.lock
# They come along with vLLM, don't import beside a CPU torch, and a text model needs none of them.
UNWANTED := torchaudio torchcodec torchvision
PYTEST := $(BIN)/python -m pytest
# Engines want all cores for themselves; the other tests share them.
WITHOUT_ENGINES := -m "not real" -n auto --dist loadfile
# Tests with deadlines can starve beside others, and on a machine that others use: what failed is told, and run
# once more by itself, which decides.
decided = { $(PYTEST) $(1) || $(PYTEST) $(2) --last-failed --last-failed-no-failures none; }
PIP := $(BIN)/python -u -m pip install --disable-pip-version-check
PIP_LOG := $(VENV)/pip.log
PIP_FAILED := { tail -n 20 $(PIP_LOG) >&2; exit 1; }
VERSION ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-spark check lint bench validate-whatif contract docs pictures dashboards format lock clean venv

help:  ## This list
	@echo "kvscope: make TARGET"; echo
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | \
		awk -F '\t' '{ printf "  %-17s %s\n", $$1, $$2 }'
	@echo; echo "The first of them makes $(VENV) with real engines: 4 GB, a few minutes, once."

demo: $(STAMP)  ## A prefill and a decode engine, a router, a load, and `kvscope top` on it (ARGS="--mode pull")
	@$(BIN)/kvscope demo $(ARGS)

test: lint  ## Everything, on two real engines too (ARGS="-m 'not real'" leaves those out)
	@$(if $(ARGS),$(PYTEST) $(ARGS),$(call decided,$(WITHOUT_ENGINES),-m "not real") && $(call decided,-m real,-m real))

test-spark: $(STAMP)  ## A real Spark reads the archive: minutes (needs Java 17; installs PySpark into build/)
	@PYTHON=$(PYTHON) tests/spark/venv.sh build/spark-venv
	@$(PYTEST) -q -s tests/spark/spark_reads.py $(ARGS)

check: lint  ## What a change must pass: lint, types, walls, docs, the tests without engines
	@$(PYTEST) -q $(WITHOUT_ENGINES) $(ARGS)

lint: $(STAMP)  ## Lint, format, types, walls, docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy docs bench
	@$(BIN)/lint-imports
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python -m kvscope.dashboards.build --check

bench: $(STAMP)  ## What kvscope costs, measured on this machine (ARGS="--json")
	@for bench in bench/[a-z]*.py; do $(BIN)/python $$bench $(ARGS); done

validate-whatif: $(STAMP)  ## Is `kvscope whatif` right? The same load under push and pull on real engines: ten minutes
	@$(BIN)/python -m kvscope.demo.validate_whatif $(ARGS)

contract: $(STAMP)  ## Compare the methods we override with a vLLM release: make contract VERSION=0.33.0
	@test -n "$(VERSION)" || { echo "say which vLLM: make contract VERSION=0.33.0" >&2; exit 2; }
	@$(BIN)/python -m kvscope.connectors.contract --version $(VERSION) $(ARGS)

docs: $(STAMP)  ## Write docs/*.md anew from the code
	@$(BIN)/python docs/generate.py

dashboards: $(STAMP)  ## Write dashboards, rules and the runbook anew from the code
	@$(BIN)/python -m kvscope.dashboards.build

pictures: $(STAMP)  ## Take docs/pictures/*.svg anew, from real engines: ten minutes
	@$(BIN)/python docs/pictures.py $(ARGS)

pictures-grafana: $(STAMP)  ## Take docs/pictures/grafana-*.png anew: ten minutes (needs chromium, npm; ARGS="--simulated")
	@$(BIN)/python docs/grafana_pictures.py $(ARGS)

format: $(STAMP)  ## Sort imports, mend what the linter can mend, lay out the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

venv: $(STAMP)  ## Make .venv from the lock file, if it isn't there yet
	@echo "$(VENV) is ready"

$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c "import sys, platform as p; sys.exit(sys.version_info[:2] != (3, 11) or p.machine() != 'x86_64')" || \
		{ echo "the engines need Python 3.11 on x86-64: make PYTHON=python3.11" >&2; exit 1; }
	@echo "[1/4] $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch"
# With its own dependencies, as these depend on the build of torch that pip finds.
	@$(PIP) -c $(LOCK) "$$(grep '^torch==' $(LOCK))" >/dev/null 2>$(PIP_LOG) || $(PIP_FAILED)
	@echo "[3/4] the other $$(grep -c == $(LOCK)) packages, vLLM and NIXL among them"
	@$(PIP) --no-deps -r $(LOCK) 2>$(PIP_LOG) | \
		awk '/^Collecting/ && ++n % 20 == 0 { print "      " n " found"; fflush() } \
		     /^Installing/ { print "      unpacking"; fflush() }' || $(PIP_FAILED)
	@echo "[4/4] kvscope"
	@$(PIP) --no-deps --no-build-isolation -e . >/dev/null 2>$(PIP_LOG) || $(PIP_FAILED)
	@touch $@

lock:  ## Take the newest versions that pyproject.toml allows into requirements.lock
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --disable-pip-version-check -e ".[all,engines,dev]" \
		>/dev/null 2>build/pip.log || { tail -n 20 build/pip.log >&2; exit 1; }
	@{ sed -n '/^#/p' $(LOCK); \
	   build/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip --exclude wheel \
	     $(addprefix --exclude ,$(UNWANTED)) | sed 's/^\(torch==[0-9.]*\)+.*/\1/; /^nvidia-/d'; } > build/$(LOCK)
	@mv build/$(LOCK) $(LOCK)
	@rm -rf build/lock
	@echo "$(LOCK): $$(grep -c == $(LOCK)) packages"

clean:  ## Remove what was built, .venv too
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
