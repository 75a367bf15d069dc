"""Kernel IR: index expressions, data-flow graphs, kernel programs (phases); printer, JSON, verifier, reference
interpreter.

A `program.Program` is everything that one generated kernel is; nothing in it depends on the device or the process.
"""
