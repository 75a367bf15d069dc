"""Machine description of a CPU core for schedule enumeration and ranking: SIMD width, registers, ports, caches."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jcuts.arch.cpu_cores import CORE, Core


@dataclass(frozen=True)
class Machine:
    """One kind of core.

    Attributes:
        vector_bytes: width of a vector register [B]; registers: how many there are.
        threads: of the pool that runs a kernel's tasks.
        l1, l2: sizes of a core's data caches [B].
        fma_ports, load_ports, store_ports: full-width vector instructions per cycle; cores that split them (one port)
            run two of half the width.
        line: bytes of a cache line. core: latency, issue width, ... (`arch.cpu_cores`).
    """

    vector_bytes: int
    registers: int
    threads: int
    l1: int = 32 << 10
    l2: int = 1 << 20
    fma_ports: int = 2
    load_ports: int = 2
    store_ports: int = 1
    line: int = 64
    core: Core = CORE

    def __repr__(self) -> str:
        """Part of the key of stored rankings: a core that nothing else is known of is not named."""
        named = [f.name for f in fields(self) if f.name not in ("line", "core") or getattr(self, f.name) != f.default]
        return f"Machine({', '.join(f'{name}={getattr(self, name)!r}' for name in named)})"

    def slots(self, ports: int, size: float) -> float:
        """Slots of a full-width port that an instruction on ``size`` bytes takes."""
        return max(size / self.vector_bytes, ports / max(2, ports) if 2 * size <= self.vector_bytes else 1.0)
