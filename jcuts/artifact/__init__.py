"""Artefacts: tuned programs with their kernels as one file that runs without compilers, tuner and database.

In: exported programs, kernels, weights and records (`jcuts.jit.export` makes them).  Out: a file, and a callable from
it.  Everything here imports jax, numpy and the native library alone: neither numba nor llvmlite nor a solver.
"""
