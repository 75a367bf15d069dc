"""Ahead-of-time export of decided programs for artefacts, with the record of their errors.

In: a traced call and its decision.  Out: programs, kernels and records, which `jcuts.artifact` writes into a file.
"""
