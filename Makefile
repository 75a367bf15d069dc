# `make test` and `make demo` need Python 3.11-3.13, gcc/g++ and make; everything else is installed into .venv.

PYTHON ?= python3
CXX ?= g++
PYTEST_ARGS ?= -n auto --dist loadgroup
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(patsubst %,jcuts/_native/libjcuts_%.so,cpu cuda cudnn)

# An environment is installed again when what decides its contents changes, and only then.
INPUTS := pyproject.toml CMakeLists.txt $(wildcard custom_calls/*)
KEY := $(shell cat $(INPUTS) | cksum | cut -d' ' -f1)
TEST_STAMP := $(VENV)/.jcuts-test-$(KEY)
DEMO_STAMP := $(VENV)/.jcuts-demo-$(KEY)

CUDA_STAMP := $(VENV)/.jcuts-cuda-$(KEY)
# Tests of generated CUDA code need its compilers, not a GPU: `make test` leaves them to `make test-cuda`.  Files without
# the words have none; some import the mark as `compiled`.
CUDA_TESTS = $(sort $(shell grep -rlwE "cuda_compilers|more_with_cuda_compilers|compiled" tests --include="test_*.py"))

.PHONY: help test test-cuda slow demo lint unit native clean

help:
	@echo "make test    lint, type check, import contracts and tests"
	@echo "make test-cuda  what make test leaves out without CUDA's compilers: installs them, needs no GPU"
	@echo "make slow    all tests, the slow ones too, against XLA compiled as users have it"
	@echo "make demo    jcuts against jax.jit on MobileNetV2"
	@echo "make native  the native libraries, in place"
	@echo "make clean   everything that was built, but not .venv"

test: lint unit

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

unit: $(TEST_STAMP) $(NATIVE)
	$(BIN)/python -m pytest -m "not cuda_compilers" $(PYTEST_ARGS)

test-cuda: $(CUDA_STAMP) $(NATIVE)
	$(BIN)/python -m pytest -m "cuda_compilers or more_with_cuda_compilers" $(PYTEST_ARGS) $(CUDA_TESTS)
	$(BIN)/python benchmarks/gpu_checks/assemble.py --each 2 --no-golden --out build/assemble

slow: $(TEST_STAMP) $(NATIVE)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not gpu and (slow or not slow)" --xla-as-shipped

demo: $(DEMO_STAMP)
	@echo "jcuts demo: minutes the first time (it measures kernels, with bars in a terminal), about a minute later"
	$(BIN)/jcuts demo

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "jcuts needs Python 3.11 to 3.13, %s is %d.%d: use make PYTHON=..." % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)

# Editable: tests, `jcuts` and an import from anywhere run the same sources.  The wheel is built in isolation from
# pyproject.toml's build requirements, as any user's `pip install` would.
$(TEST_STAMP): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,demo]"
	rm -f $(VENV)/.jcuts-test-* $(VENV)/.jcuts-demo-*
	touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): | $(BIN)/python
	@echo "installing jcuts and keras into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo]"
	rm -f $(VENV)/.jcuts-demo-*
	touch $@

$(CUDA_STAMP): $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cuda-compilers]"
	rm -f $(VENV)/.jcuts-cuda-*
	touch $@

# In place, for a source tree: one file each, no build system. `pip install` builds the same through CMakeLists.txt.
native: $(NATIVE)

jcuts/_native/libjcuts_cpu.so: custom_calls/launch_cpu.cc
jcuts/_native/libjcuts_cuda.so: custom_calls/launch_cuda.cc
jcuts/_native/libjcuts_cudnn.so: custom_calls/cudnn_conv.cc

# The headers are those of the installed jaxlib.
$(NATIVE): $(wildcard custom_calls/*.h) | $(DEMO_STAMP)
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -fPIC -shared -pthread -Wall -Wextra -Wno-unused-parameter \
	  -isystem "$$($(BIN)/python -c 'import jax.ffi; print(jax.ffi.include_dir())')" $(filter %.cc,$^) -o $@.new -ldl
	mv $@.new $@

clean:
	rm -rf build dist jcuts/_native *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find jcuts tests -name __pycache__ -type d -prune -exec rm -rf {} +
