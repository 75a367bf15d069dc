"""Kernel program -> numba.cuda source -> PTX -> cubin, with no GPU needed."""
