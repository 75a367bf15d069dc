"""GPU architecture files: a measured `GpuArch` as TOML, in the form of the files in ``data/``."""

from __future__ import annotations

from jcuts.arch.gpu import GpuArch
from jcuts.arch.toml_entry import quoted, written, written_table

UNITS = {
    "num_sm": "SM",
    "perf_peak": "FLOP/s",
    "bw_global": "byte/s",
    "transaction_bytes": "byte",
    "lat_shared": "cycle",
    "max_shared": "byte",
    "max_thread": "thread",
    "clock": "Hz",
    "compute_capability": "",
    "warp_size": "thread",
    "max_threads_per_sm": "thread",
    "max_blocks_per_sm": "block",
    "registers_per_thread": "register",
    "registers_per_sm": "register",
    "shared_per_sm": "byte",
    "shared_reserved": "byte",
    "shared_banks": "bank",
    "shared_bank_bytes": "byte",
    "issue_per_clock": "warp instruction/cycle",
    "l2_bytes": "byte",
    "bw_l2": "byte/s",
}
"""Numbers at the head of a file; the first seven are Table 3.4 of the thesis."""
TABLE_34 = 7
MEASURED_UNITS = {
    "dram_read": "byte/s",
    "l2_read": "byte/s",
    "dram_latency": "cycle",
    "l2_latency": "cycle",
    "launch_seconds": "s",
    "grid_barrier_seconds": "s",
}


def to_toml(arch: GpuArch, head: str) -> str:
    """A GPU as the text of a file that `arch.load.parse_gpu` reads.

    Args: arch: whose ``sources`` name every number; head: a line of what it is.
    """
    lines = [written(key, getattr(arch, key), unit, arch.sources[key]) for key, unit in UNITS.items()]
    first, rest = lines[:TABLE_34], lines[TABLE_34:]
    text = [f"# {head}", f"name = {quoted(arch.name)}", "", "# Table 3.4 of the thesis", *first]
    text += ["", "# what registers, occupancy and the true bound need", *rest]
    flop = written_table("flop_per_clock_sm", dict(arch.flop_per_clock_sm), {"": "FLOP/cycle/SM"}, arch.sources)
    seen = written_table("measured", dict(arch.measured), MEASURED_UNITS, arch.sources)
    return "\n".join([*text, flop, *filter(None, [seen])]) + "\n"
