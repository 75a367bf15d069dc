"""Dispatch of calls whose signatures run several programs: which arguments tell them apart."""
