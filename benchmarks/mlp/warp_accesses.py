"""Memory transactions and bank conflicts of a warp, counted from addresses: `segments`, `passes`, `tile_accesses`.

A load of global memory takes one transaction per 32-byte segment that the warp touches; one of shared memory takes as
many passes as the busiest bank has different words.  `tile_accesses` gives the addresses of the tiled kernel of
`cuda_gemm.py`, so that coalescing and padding can be judged without a GPU.  Source: CUDA C++ Programming Guide, "Device
Memory Accesses" and "Shared Memory"; J. P. Binagia, "CME 213 Final Report", 4.4.
"""

from __future__ import annotations

from collections.abc import Iterable

WARP = 32
SEGMENT = 32
"""Bytes of a transaction of global memory."""
BANKS = 32
DOUBLE = 8
"""Bytes of an element."""
BANK_BYTES = (4, 8)
"""Widths of a bank: 4 on every GPU since compute capability 5.0, 8 where 3.x is so configured."""


def segments(addresses: Iterable[int], size: int = DOUBLE) -> int:
    """Transactions of one access of global memory. Args: addresses: of elements of ``size`` bytes [B], one per thread.

    >>> segments(range(0, 256, 8)), segments(range(0, 32 * 6272, 6272))
    (8, 32)
    """
    return len({byte // SEGMENT for address in addresses for byte in (address, address + size - 1)})


def passes(addresses: Iterable[int], size: int = DOUBLE, bank_bytes: int = 4) -> int:
    """Passes of one access of shared memory: most different words in one bank. Threads that read one word share it.

    >>> passes(range(0, 256, 8)), passes(range(0, 256, 8), bank_bytes=8), passes([0] * 32, bank_bytes=8)
    (2, 1, 1)
    """
    words = {word for a in addresses for word in range(a // bank_bytes, (a + size - 1) // bank_bytes + 1)}
    busy = [0] * BANKS
    for word in words:
        busy[word % BANKS] += 1
    return max(busy)


def tile_accesses(block: int, coalesced: bool, padding: int, columns: int) -> dict[str, list[int]]:
    """Addresses [B] of the first warp of the tiled kernel, by access.

    Args: padding: elements behind each row of a tile.  columns: of the row-major matrix in global memory.
    """
    threads = [(t % block, t // block) for t in range(min(WARP, block * block))]
    places = [(y, x) if coalesced else (x, y) for x, y in threads]
    pitch = block + padding
    return {
        "global load": [DOUBLE * (r * columns + c) for r, c in places],
        "shared store": [DOUBLE * (c * pitch + r) for r, c in places],
        "shared load of A": [DOUBLE * r for r, _ in places],
        "shared load of B": [DOUBLE * (c * pitch) for _, c in places],
    }


def counts(block: int, coalesced: bool, padding: int, columns: int, bank_bytes: int = 4) -> dict[str, int]:
    """Transactions (global) and passes (shared) of each access of `tile_accesses`."""
    found = tile_accesses(block, coalesced, padding, columns)
    return {n: segments(a) if n.startswith("global") else passes(a, bank_bytes=bank_bytes) for n, a in found.items()}
