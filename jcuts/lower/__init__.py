"""Lowering: a region (set of equations) -> one unscheduled kernel program, or a refusal with a reason.

In: tensor-level operations of `ops/` in a `tensor_graph.py`.  Out: a `kernel_ir` program without tiles.  `patterns/`
recognises canonical forms (GEMM, implicit GEMM, attention, ...) in finished programs.
"""
