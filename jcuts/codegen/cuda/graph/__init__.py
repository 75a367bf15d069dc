"""Emits data-flow graphs (`kernel_ir.node`) as scalar GPU code: loads and stores, accumulators, predication.

In: a graph and the values of its axes.  Out: LLVM values; every kernel family uses these for its element-wise parts.
"""
