"""Performance models without a device: lower bounds of CPU and GPU kernels, launch records (`gpu_kernel.py`),
`thesis/`.
"""
