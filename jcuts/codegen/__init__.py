"""Code generation: scheduled kernel program -> machine code (`codegen.artifact.CompiledKernel`).

`cpu/` and `cuda/` are the back ends, `llvm/` what both share, `vecmath/` vector functions with error bounds.
"""
