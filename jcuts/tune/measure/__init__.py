"""Measures candidates: launches on fenced, poisoned buffers (CPU, CUDA driver), chain timing, noise statistics."""
