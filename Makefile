#   make demo     train a draft on a real pipeline's taps, every tap verified (under 90 s)
#   make test     all tests; those that need hardware this machine lacks are skipped, with the reason
#   make check    ruff, pyright, clang-format, clang-tidy, and whether the stub is current
#   make bench    taps in host memory beside every other way to move the same bytes, with plots
#   make gpu      the GPU tests, the long litmus and the benches; builds offline, on the machine's own torch
#   make rdma     the tests on RDMA verbs, in an emulated guest with two Soft-RoCE devices; needs root
#   make stub     write tapchannel/_native.pyi anew from the built module
#   make campaign every fault, on either side, at every moment: docs/campaign.md; about 20 minutes
#   make fuzz     10^6 inputs for what reads a peer's bytes (minutes)
#   make stress   ten million messages in any way, every one checked, and channels made and closed;
#                 MESSAGES=, PRODUCERS=, SECONDS=, CYCLES= and SEED= change it
#   make sanitize real tests on a native module built with ASan and UBSan, then with TSan
#   make mutants  break each invariant on purpose: its test must fail
#   make format   put ruff's and clang-format's layout on every file
#   make clean    remove what was built; .venv stays
#
# More arguments for demo, test, bench, and the tests of gpu and rdma: make test ARGS='-k abort'

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BUILD := build/dev
NATIVE := native $(wildcard native/*.cpp native/*.hpp native/CMakeLists.txt)
CXX_FILES := $(foreach folder,native tests/model tests/fuzz tests/streams tests/bells tests/support bench,$(wildcard $(folder)/*.hpp $(folder)/*.cpp))
STUBGEN := $(BIN)/python -m nanobind.stubgen -q -m tapchannel._native

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check bench gpu rdma stub campaign fuzz stress sanitize mutants format clean

help:
	@sed -n '/^#/!q; s/^# \{0,2\}//p' Makefile

# One stamp for the tools, one for the installed package: a second run does neither.
$(VENV)/.tools: requirements-dev.txt requirements-megatron.txt
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler: install g++"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "$(PYTHON) must be Python 3.10 to 3.13: make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s, sys; \
	  sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' \
	  || { echo "Python.h of $(PYTHON) is missing: install python3-dev"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || { rm -rf $(BUILD) && $(PYTHON) -m venv --clear $(VENV); } \
	  || { echo "cannot make $(VENV): install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --ignore-requires-python \
	  --only-binary :all: -r requirements-megatron.txt
	@touch $@

# Editable: Python edits need no build; an edit under native/ builds what changed.
$(VENV)/.built: $(VENV)/.tools $(NATIVE) pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings=build-dir=$(BUILD) -e .
	@touch $@

demo: $(VENV)/.built
	$(BIN)/tapchannel demo $(ARGS)

test: $(VENV)/.built
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.built
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	printf '%s\n' native/*.cpp | xargs -n 1 -P 2 $(BIN)/clang-tidy --quiet -p $(BUILD)
	$(STUBGEN) -o $(BUILD)/_native.pyi
	diff -u tapchannel/_native.pyi $(BUILD)/_native.pyi || { echo "run make stub"; exit 1; }

bench: $(VENV)/.built
	$(BIN)/tapchannel bench all --device cpu $(ARGS)

gpu:
	$(PYTHON) tests/support/gpu_run.py $(ARGS)

# Every test takes many times as long there. Only this folder: even to import the others takes minutes.
# No watchdog of pytest's: it is a thread, and the tests fork.
rdma: $(VENV)/.built
	tests/rdma/guest.sh $(BIN)/python -m pytest tests/rdma -m rdma --require rdma -o timeout=300 \
	  -o faulthandler_timeout=0 $(ARGS)

stub: $(VENV)/.built
	$(STUBGEN) -o tapchannel/_native.pyi

campaign: $(VENV)/.built
	cd tests && ../$(BIN)/python -m campaign $(ARGS)

fuzz: $(VENV)/.built
	$(BIN)/python tests/fuzz/run.py $(ARGS)

stress: $(VENV)/.built
	cd tests && ../$(BIN)/python -m stress $(if $(MESSAGES),--messages $(MESSAGES)) \
	  $(if $(PRODUCERS),--producers $(PRODUCERS)) $(if $(SECONDS),--seconds $(SECONDS)) \
	  $(if $(CYCLES),--cycles $(CYCLES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

sanitize: $(VENV)/.built
	$(BIN)/python tests/sanitize.py $(ARGS)

mutants: $(VENV)/.built
	$(BIN)/python tests/mutants.py $(ARGS)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis $(VENV)/.built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
