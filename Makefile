# `make demo` shows the kernels at work on this machine; `make test` is the whole gate. Both need Rust, a C compiler
# and Python 3, and set up everything else by themselves.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Recipes below share the .venv and Cargo's lock: running them at once gains nothing.
.NOTPARALLEL:

PYTHON ?= python3
# Architectures and folder of the kernel pack.
ARCH ?= 80,90a
OUT ?= packs
# Further words for `warpsmith bench`, `warpsmith demo`, `warpsmith evidence` and the wheel's `maturin build`.
ARGS ?=

VENV := .venv
# With PyTorch, for the Python package.
PYTHON_VENV := .venv-python
# With Ray Serve.
RAY_VENV := .venv-ray
# With nothing but what builds the wheel.
WHEEL_VENV := .venv-wheel
READY := $(VENV)/.ready
WARPSMITH := VIRTUAL_ENV="$(CURDIR)/$(VENV)" target/release/warpsmith

.PHONY: help setup build demo test test-python test-ray sanitize coverage build-kernels wheel bench evidence fmt lint hooks clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make .venv with the CUDA compilers and the linter
	@

$(READY): scripts/requirements.txt scripts/setup.sh
	scripts/setup.sh "$(PYTHON)" "$(VENV)"

build: ## Build the release binary
	cargo build --release -p warpsmith-cli

# Without network or Python the demo runs all the same, only nothing can be compiled for a GPU. The compilers are fetched
# while the binary is built. As in the gate, nothing is optimised across parts of the library: that takes two minutes off the build,
# and prompts of models are up to 8 % slower. `make build` has it all.
demo: ## Build, then let a small model answer and show the kernels at work
	@$(MAKE) --no-print-directory setup > .setup.log 2>&1 & compilers=$$!; \
	CARGO_PROFILE_RELEASE_LTO=off $(MAKE) --no-print-directory build; \
	wait $$compilers || { cat .setup.log; echo "warning: no CUDA compiler could be set up; going on without" >&2; }; \
	rm -f .setup.log
	@model=$$(scripts/model.sh "$(PYTHON)") || echo "warning: no model could be fetched; going on with the kernels" >&2; \
	$(WARPSMITH) demo $${model:+--quick --model "$$model"} $(ARGS)

test: setup ## Everything that must pass: format, lints, tests, compilation for every GPU, the Python package
	scripts/test.sh "$(PYTHON)" "$(VENV)" "$(PYTHON_VENV)"

test-python: ## The wheel, and all tests of the Python package, slow ones too, with PyTorch in an environment of its own
	scripts/python-test.sh "$(PYTHON)" "$(PYTHON_VENV)"

test-ray: build ## Two replicas with Ray Serve on this machine, in an environment of their own
	scripts/ray-test.sh "$(PYTHON)" "$(RAY_VENV)"

sanitize: ## Address and thread sanitizers over the CPU tests of tensors, plans, threads, products and ops, and random calls
	scripts/sanitize.sh

coverage: ## The lines of the library that its tests run (ARGS="warpsmith-server -- --test server" for another part); compiles all anew
	scripts/coverage.sh $(ARGS)

build-kernels: setup build ## Compile CUDA kernels ahead of time (ARCH=80,90a OUT=packs)
	$(WARPSMITH) build-kernels --arch "$(ARCH)" --out "$(OUT)"

wheel: ## Build the Python wheel into dist (ARGS="--zig --compatibility manylinux_2_28" for older systems)
	scripts/python-setup.sh "$(PYTHON)" "$(WHEEL_VENV)" requirements-wheel.txt
	scripts/wheel.sh "$(WHEEL_VENV)" $(ARGS)

bench: build ## Time every op on this machine
	$(WARPSMITH) bench $(ARGS)

evidence: ## Prove, time and sanitize what has changed, for eight minutes (ARGS="--budget 1h --device cpu")
	if command -v cargo >/dev/null; then $(MAKE) --no-print-directory build; fi
	$(WARPSMITH) evidence --refresh --python "$(PYTHON)" $(ARGS)

fmt: setup ## Format Rust and Python
	cargo fmt --all
	$(VENV)/bin/ruff format bench scripts crates/profile/tests crates/server/tests crates/cli/tests deploy

lint: setup ## Format check and lints alone
	scripts/lint.sh "$(VENV)"

hooks: ## Check format and lints before every commit
	scripts/install-hooks.sh

clean: ## Remove everything that was built
	cargo clean
	rm -rf .tools "$(VENV)" "$(PYTHON_VENV)" "$(RAY_VENV)" "$(WHEEL_VENV)" "$(OUT)" dist
