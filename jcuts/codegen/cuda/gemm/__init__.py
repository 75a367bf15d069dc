"""GEMM kernels: `mma.sync`, `wgmma`, float64 `mma` and SIMT (FFMA) mainloops with their shared-memory tiles and
epilogue.

In: a program that `lower/patterns/gemm.py` recognises, with a schedule of `schedule/gpu/gemm`.  Out: the LLVM IR and
inline PTX of one thread.  The convolutions of `conv/` and the warp-specialised kernel (`warp_specialized/`) are
built from the same parts.
"""
