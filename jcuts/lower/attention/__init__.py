"""Lowering of attention and of its backward pass to kernel programs of several phases."""
