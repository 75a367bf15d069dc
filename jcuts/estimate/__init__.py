"""Performance models without a device: one expression of resource terms per kernel, read as predicted time, roofline
bound and the thesis' PUL.

`time_model.py` has the terms, `gpu_kernel.py`, `cpu_kernel.py` and `cpu.py` the models of generated kernels, `thesis/`
the published model.
"""
