"""Limits of a streaming multiprocessor (SM) per compute capability: read once from ``sm_limits.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from jcuts.base.errors import ModelError


@dataclass(frozen=True)
class SmLimits:
    """What one SM of a compute capability has, and what a block or a thread may take of it.

    Attributes:
        registers_per_sm, registers_per_thread: 32-bit registers.
        threads_per_sm, threads_per_block, blocks_per_sm, warp_threads: counts.
        smem_per_sm_bytes: shared memory; smem_per_block_bytes: of a block, opt-in; smem_static_bytes: without opt-in;
            smem_reserved_per_block_bytes: what the system takes for every block.
        cache_line_bytes, sector_bytes: of the caches; the least that memory moves.
        cluster_blocks: blocks of the largest portable thread block cluster, 1 where there are none.
    """

    registers_per_sm: int
    registers_per_thread: int
    threads_per_sm: int
    threads_per_block: int
    blocks_per_sm: int
    warp_threads: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    smem_static_bytes: int
    smem_reserved_per_block_bytes: int
    cache_line_bytes: int
    sector_bytes: int
    cluster_blocks: int


_MAY_BE_ZERO = "smem_reserved_per_block_bytes"


def parse_limits(text: str, file: str) -> Mapping[str, SmLimits]:
    """Limits by name (``"sm_90"``) from the text of a data file.

    Raises: ModelError where a table lacks a limit, has an unknown one, or one that is no positive integer (what the
    system takes for a block may be 0).
    """
    known = {f.name for f in fields(SmLimits)}
    found = {}
    for name, table in tomllib.loads(text).items():
        if set(table) != known:
            raise ModelError(f"{file}: {name}: missing or unknown limits {sorted(known ^ set(table))}", file=file)
        least = {k: int(k != _MAY_BE_ZERO) for k in known}
        wrong = [k for k, v in table.items() if not isinstance(v, int) or isinstance(v, bool) or v < least[k]]
        if wrong:
            raise ModelError(f"{file}: {name}: {wrong} must be positive integers", file=file)
        found[name] = SmLimits(**table)
    return MappingProxyType(found)


_FILE = Path(__file__).with_name("sm_limits.toml")
LIMITS = parse_limits(_FILE.read_text(encoding="utf-8"), _FILE.name)
"""All compute capabilities that schedules and code generators know, by name."""
NEWEST_CAPABILITY = max(divmod(int(name.removeprefix("sm_")), 10) for name in LIMITS)
"""The newest of them, as (major, minor)."""
SM_90 = LIMITS["sm_90"]


def limits_of(capability: tuple[int, int]) -> SmLimits | None:
    """Limits of a compute capability (major, minor); None where they are not known."""
    return LIMITS.get(f"sm_{capability[0]}{capability[1]}")


@functools.cache
def nearest_limits(capability: tuple[int, int]) -> SmLimits:
    """Limits of a compute capability, or of the newest known one before it (of the oldest, if there is none before).

    A GPU newer than the tables is taken for the newest of them that is older.
    """
    known = sorted(divmod(int(name.removeprefix("sm_")), 10) for name in LIMITS)
    before = [one for one in known if one <= capability]
    major, minor = before[-1] if before else known[0]
    return LIMITS[f"sm_{major}{minor}"]
