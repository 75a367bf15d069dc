"""CUDA back end: scheduled kernel program -> numba.cuda source -> LLVM IR with inline PTX -> cubin, with no GPU needed.

`compile.py` drives it, `split_kernels.py` splits a program into launches (split-K, split reductions, split scans),
`launch_source.py` writes the index decoding of a launch; they ask `families.py`, the registry of kernel families.  A
folder per kernel family holds what one thread does (`tile_kernel.py`), its launch and its split, with the same names as
`schedule/gpu`; `ptx/` and `graph/` are what all families share, `toolchain/` runs the assembler.
"""
