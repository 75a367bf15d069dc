"""LLVM IR helpers that the CPU and the CUDA back end share: vector lanes, element-wise operations."""
