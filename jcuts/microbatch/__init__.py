"""Micro-batching of cuDNN convolutions: divides a batch so that fast algorithms fit a workspace limit.

Offline: measured tables in, divisions out; no device, no JAX.  Source: Oyama, Ben-Nun, Hoefler, Matsuoka, *Accelerating
Deep Learning Frameworks with Micro-batches* (2018), called "the paper" in this package.
"""
