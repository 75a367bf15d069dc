"""Performance models without a device: roofline bounds of CPU and GPU kernels, the thesis' PUL score.

`cpu.py` and `gpu_kernel.py` are the models of generated kernels, `thesis/` the published model.
"""
