"""Persistent kernels of loops: all steps of a scan in one launch."""
