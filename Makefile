# Tandem: make serve | test | test-all | lint | bench | protos
#
#   PORT=8000  ENGINES=1  MODEL=smollm2-135m-instruct  DRAFT=auto|none|ngram|…  ARGS="any other flag of tandem serve"
#   PYTHON=python3.12     the interpreter to build .venv with (3.11 to 3.14); found by itself if unset
#   TORCH_INDEX=URL       package index for torch; "default" means pip's own index
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint format bench protos kernels conformance e2e doctor clean preflight

PORT ?= 8000
ENGINES ?= 1
MODEL ?= smollm2-135m-instruct
DRAFT ?= auto
ARGS ?=
VENV ?= .venv
PYTHON ?=
# The release that the tests run with. A machine may offer a local build of it (+cpu).
TORCH ?= torch==2.13.0
TORCH_INDEX ?= auto

BIN := $(VENV)/bin
BUILD_KERNELS = $(BIN)/python -c "from kernels.cpu.build import main; raise SystemExit(main())"
STAMPS := $(VENV)/.stamps
CXX_FOUND := $(shell command -v c++ g++ clang++ 2>/dev/null | head -n 1)
KERNELS_STAMP := $(STAMPS)/kernels-$(if $(CXX_FOUND),built,no-compiler)
PROTOS := $(wildcard protos/tandem/*/v1/*.proto)
KERNEL_SOURCES := $(shell find kernels/cpu -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name 'build.py' 2>/dev/null)

help:
	@sed -n '1,7p' Makefile

# Finds an interpreter, then checks this machine before anything is installed. Exit 2 with one line per problem.
preflight:
	@python=$$(PYTHON="$(PYTHON)" sh deploy/setup/find-python.sh) || exit 2; \
	if [ -f $(STAMPS)/run ]; then "$$python" -I tandem/cli/preflight.py --installed --port $(PORT); \
	else "$$python" -I tandem/cli/preflight.py --port $(PORT) --venv $(VENV); fi

serve: preflight $(STAMPS)/run $(STAMPS)/stubs $(KERNELS_STAMP)
	@exec $(BIN)/tandem serve --port $(PORT) --engines $(ENGINES) --model "$(MODEL)" --draft "$(DRAFT)" $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/stubs $(KERNELS_STAMP)
	$(BIN)/python -m pytest

test-all: $(STAMPS)/dev $(STAMPS)/stubs $(KERNELS_STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" --timeout 1800

lint: $(STAMPS)/dev $(STAMPS)/stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/dev $(STAMPS)/stubs $(KERNELS_STAMP)
	$(BIN)/python -m benchmarks.cpu $(ARGS)

e2e: $(STAMPS)/dev $(STAMPS)/stubs $(KERNELS_STAMP)
	$(BIN)/python -m pytest tests/e2e -m "slow or not slow"

# Runs a black-box suite of OpenAI's API against a freshly started stack: make conformance SUITE=folder
conformance: $(STAMPS)/dev $(STAMPS)/stubs $(KERNELS_STAMP)
	$(BIN)/python deploy/ci/conformance.py "$(SUITE)"

protos: $(STAMPS)/dev
	$(BIN)/python protos/generate.py
	@touch $(STAMPS)/stubs

kernels: $(STAMPS)/run
	$(BUILD_KERNELS)

doctor: $(STAMPS)/run $(STAMPS)/stubs
	$(BIN)/tandem doctor --port $(PORT)

clean:
	rm -rf $(VENV) build dist tandem_llm.egg-info tandem/inference tandem/engine tandem/draft tandem/router kernels/cpu/_build

# --- set-up, each step once: a second call uses no network -------------------------------------------------------

$(STAMPS)/venv:
	@$(MAKE) --no-print-directory preflight STAMPS=/nonexistent
	@python=$$(PYTHON="$(PYTHON)" sh deploy/setup/find-python.sh) || exit 2; \
	test -x $(BIN)/python || "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: | $(STAMPS)/venv
	$(BIN)/python -I deploy/setup/install_torch.py "$(TORCH)" --index "$(TORCH_INDEX)"
	@touch $@

$(STAMPS)/run: pyproject.toml setup.py | $(STAMPS)/torch
	@echo "Installing Tandem and what it needs: some minutes without a word."
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(STAMPS)/constraints.txt grpcio-tools -e .
	@touch $@

$(STAMPS)/dev: pyproject.toml setup.py | $(STAMPS)/torch
	@echo "Installing Tandem, what it needs, and what its tests need: some minutes without a word."
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(STAMPS)/constraints.txt -e '.[dev]'
	@touch $(STAMPS)/run $@

$(STAMPS)/stubs: $(PROTOS) protos/generate.py | $(STAMPS)/run
	$(BIN)/python protos/generate.py
	@touch $@

$(STAMPS)/kernels-built: $(KERNEL_SOURCES) | $(STAMPS)/run
	@echo "Building the C++ kernels: about a minute."
	@if [ -f kernels/cpu/build.py ]; then $(BUILD_KERNELS) || \
	echo "The C++ kernels could not be built (see above): everything runs on the slower torch path."; fi
	@touch $@

$(STAMPS)/kernels-no-compiler: | $(STAMPS)/run
	@echo "No C++ compiler was found (c++, g++ or clang++): everything runs on the slower torch path."
	@echo "For the fast kernels: sudo apt-get install g++ (macOS: xcode-select --install), then run make again."
	@touch $@
