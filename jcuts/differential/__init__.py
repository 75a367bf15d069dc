"""Differential testing of a function (`jcuts.verify`): XLA's and jcuts' programs against float64, with bisection."""
