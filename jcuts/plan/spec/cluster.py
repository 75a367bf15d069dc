"""Cluster specification: GPUs, links between them, memory tiers below them; every constant names its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from jcuts.base.errors import UsageError
from jcuts.plan.spec import toml_file

GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        peak: dense 16-bit FLOP/s of the datasheet; memory [bytes]; bandwidth [bytes/s] of its memory.
        multiprocessors: thread blocks run in waves of this many: a GEMM's shape decides how full the last wave is.
        gemm_efficiency: share of peak that a large GEMM with full waves reaches.
        gemm_ramp: inner length k at which a tile spends as long filling its pipeline as computing: k / (k + ramp).
        memory_efficiency: share of ``bandwidth`` that streaming kernels reach.
        kernel_gap: seconds between two kernels of a busy stream; launch: seconds of host time per kernel (0: graphs).
        reserved: bytes that context, libraries and fragmentation take.
        skinny: FLOP/s of products with few rows (decoding), where tiles are mostly empty; 0: the tile model alone
        decides.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    multiprocessors: int = 108
    gemm_efficiency: float = 0.80
    gemm_ramp: float = 64.0
    memory_efficiency: float = 0.85
    kernel_gap: float = 3e-6
    launch: float = 0.0
    reserved: float = 1.5 * GIB
    skinny: float = 0.0


@dataclass(frozen=True)
class Link:
    """A link between GPUs: bytes/s per GPU and direction, fraction of it that collectives reach, seconds per hop and
    call.

    ``call`` is the time before the first byte moves (launch, synchronisation), ``hop`` that of each step of a ring or
    tree.
    """

    bandwidth: float
    efficiency: float = 1.0
    hop: float = 5e-6
    call: float = 1e-5

    @property
    def effective(self) -> float:
        """Bytes/s that a collective reaches."""
        return self.bandwidth * self.efficiency


NO_LINK = Link(bandwidth=1.0)
"""Between the nodes of a cluster that has only one."""


@dataclass(frozen=True)
class Tier:
    """A memory below the GPU.  Bandwidths in bytes/s: per GPU, and what all GPUs of a node get together (0: no cap).

    ``scan``: bytes/s at which the host's processor computes attention over a cache that it keeps itself (0: it does
    not).
    """

    name: str
    capacity: float
    read: float
    write: float
    shared_read: float = 0.0
    shared_write: float = 0.0
    scan: float = 0.0

    def per_gpu(self, busy: int) -> tuple[float, float]:
        """(read, write) per GPU when ``busy`` GPUs of a node use the tier at once."""
        read = min(self.read, self.shared_read / busy) if self.shared_read else self.read
        write = min(self.write, self.shared_write / busy) if self.shared_write else self.write
        return read, write


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind."""

    nodes: int
    gpus: int
    gpu: Gpu


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes, the links within and between nodes, and the tiers that each node has.

    ``overlap`` is the stated share of a transfer that hides behind computation: gradient reduction, pipeline messages,
    and tier traffic in forward and backward.  The optimiser's traffic is never hidden.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    intra: Link
    inter: Link
    host: Tier | None = None
    storage: Tier | None = None
    overlap_gradients: float = 0.0
    overlap_pipeline: float = 0.0
    overlap_tiers: float = 0.9
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(group.nodes * group.gpus for group in self.groups)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node (the smallest, when groups differ)."""
        return min(group.gpus for group in self.groups)

    @property
    def gpu(self) -> Gpu:
        """The GPU that every group has, or, when they differ, the one with the least memory.

        A plan is symmetric: each GPU must hold its share, so the smallest memory decides; speeds are handled by
        `search.heterogeneous`.
        """
        return min((group.gpu for group in self.groups), key=lambda gpu: (gpu.memory, gpu.peak))

    @property
    def capacities(self) -> list[float]:
        """Bytes of each tier: per GPU, and per node in host memory and storage."""
        return [self.gpu.memory] + [tier.capacity if tier else 0.0 for tier in (self.host, self.storage)]

    @property
    def heterogeneous(self) -> bool:
        """Whether groups have different GPUs."""
        return len({group.gpu for group in self.groups}) > 1

    def tier(self, index: int) -> Tier | None:
        """1 is the host, 2 storage."""
        return (None, self.host, self.storage)[index]

    def resized(self, gpus: int) -> Cluster:
        """The same cluster with ``gpus`` GPUs: whole nodes, or a part of one node.

        Raises: UsageError if the count cannot be had from whole nodes of this cluster.
        """
        if gpus == self.gpus:
            return self
        if gpus < 1:
            raise UsageError(f"{gpus} GPUs: at least one is needed", gpus=gpus)
        group = self.groups[0]
        if len(self.groups) > 1:
            raise UsageError(
                f"cluster {self.name} has nodes of different kinds: its {self.gpus} GPUs cannot be resized to {gpus}",
                gpus=gpus,
            )
        if gpus <= group.gpus:
            return replace(self, groups=(replace(group, nodes=1, gpus=gpus),))
        if gpus % group.gpus:
            below = gpus // group.gpus * group.gpus
            raise UsageError(
                f"{gpus} GPUs are not whole nodes of {self.name} ({group.gpus} GPUs each): "
                f"use {below} or {below + group.gpus}",
                gpus=gpus,
                per_node=group.gpus,
            )
        if self.inter == NO_LINK:
            raise UsageError(
                f"{gpus} GPUs: cluster {self.name} is one node of {group.gpus}; "
                "its file needs an [inter] link for more",
                gpus=gpus,
                per_node=group.gpus,
            )
        return replace(self, groups=(replace(group, nodes=gpus // group.gpus),))


def load(name_or_path: str) -> Cluster:
    """A preset by name, or a TOML file by path.

    Raises: UsageError (unknown preset, with the nearest), ModelError (malformed file, with file, line and key).
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return from_table(toml_file.read(name_or_path))
    if name_or_path not in presets():
        raise UsageError(
            f"cluster {name_or_path!r} is unknown{toml_file.nearest(name_or_path, presets())}", name=name_or_path
        )
    return from_table(toml_file.read(_folder() / f"{name_or_path}.toml"))


def presets() -> list[str]:
    """Names of the clusters that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return Path(str(resources.files("jcuts.plan") / "data" / "clusters"))


def from_table(table: toml_file.Table) -> Cluster:
    """Builds a cluster from its TOML table; see ``docs/planner.md`` for the keys."""
    groups = []
    for entry in table.tables("nodes"):
        groups.append(NodeGroup(entry.integer("count"), entry.integer("gpus"), _gpu(entry)))
        entry.done()
    storage, host = table.table("storage", required=False), table.table("host", required=False)
    sources = table.table("sources", required=False)
    cluster = Cluster(
        name=table.text_of("name", Path(table.path).stem),
        groups=tuple(groups),
        intra=_link(table.table("intra")),
        inter=_link(table.table("inter", required=len(groups) > 1 or groups[0].nodes > 1)),
        host=_tier("host", host),
        storage=_tier("storage", storage),
        overlap_gradients=table.number("overlap_gradients", 0.0, zero=True, high=1),
        overlap_pipeline=table.number("overlap_pipeline", 0.0, zero=True, high=1),
        overlap_tiers=table.number("overlap_tiers", 0.9, zero=True, high=1),
        sources=dict(sources.values) if sources else {},
    )
    table.done()
    return cluster


def _gpu(entry: toml_file.Table) -> Gpu:
    table = entry.table("gpu")
    assert table is not None  # required
    gpu = Gpu(
        name=table.text_of("name", "GPU"),
        peak=table.number("peak_tflops") * 1e12,
        memory=table.number("memory_gib") * GIB,
        bandwidth=table.number("bandwidth_gbs") * 1e9,
        multiprocessors=table.integer("multiprocessors", 108),
        gemm_efficiency=table.number("gemm_efficiency", 0.80, high=1),
        gemm_ramp=table.number("gemm_ramp", 64.0, zero=True),
        memory_efficiency=table.number("memory_efficiency", 0.85, high=1),
        kernel_gap=table.number("kernel_gap_us", 3.0, zero=True) * 1e-6,
        launch=table.number("launch_us", 0.0, zero=True) * 1e-6,
        reserved=table.number("reserved_gib", 1.5, zero=True) * GIB,
        skinny=table.number("skinny_tflops", 0.0, zero=True) * 1e12,
    )
    table.done()
    return gpu


def _link(table: toml_file.Table | None) -> Link:
    if table is None:  # one node: nothing is between nodes
        return NO_LINK
    link = Link(
        bandwidth=table.number("bandwidth_gbs") * 1e9,
        efficiency=table.number("efficiency", 1.0, high=1),
        hop=table.number("hop_us", 5.0, zero=True) * 1e-6,
        call=table.number("call_us", 10.0, zero=True) * 1e-6,
    )
    table.done()
    return link


def _tier(name: str, table: toml_file.Table | None) -> Tier | None:
    if table is None:
        return None
    read = table.number("read_gbs") * 1e9
    tier = Tier(
        name=name,
        capacity=table.number("capacity_gib") * GIB,
        read=read,
        write=table.number("write_gbs", read / 1e9) * 1e9,
        shared_read=table.number("shared_read_gbs", 0.0, zero=True) * 1e9,
        shared_write=table.number("shared_write_gbs", 0.0, zero=True) * 1e9,
        scan=table.number("scan_gbs", 0.0, zero=True) * 1e9,
    )
    table.done()
    return tier
