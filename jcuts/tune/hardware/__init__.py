"""Microbenchmarks of the hardware (`jcuts arch measure`): what no file and no driver tells of a CPU or a GPU."""
