# `make test` and `make demo` need Python 3.11-3.13, gcc/g++ and make; everything else is installed into .venv.

PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
NATIVE := jcuts/_native/libjcuts_cpu.so

.PHONY: native
native: $(NATIVE)

# In place, for a source tree: one file, no build system. `pip install` builds the same through CMakeLists.txt.
$(NATIVE): custom_calls/launch_cpu.cc | $(BIN)/python
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -fPIC -shared -pthread -Wall -Wextra -Wno-unused-parameter \
	  -isystem "$$($(BIN)/python -c 'import jax.ffi; print(jax.ffi.include_dir())')" $< -o $@.new
	mv $@.new $@
