"""PTX instructions as functions on an LLVM builder: ``mma``, ``wgmma``, ``cp.async``, ``mbarrier``, shuffles, SFU math.

The lowest layer of the CUDA code generator: knows instructions, no kernels.
"""
