"""A plan (mesh axes, schedule, offload) as a record, and many plans as a struct of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
TIERS = ("gpu", "host", "storage")
_SIZES = ("data", "tensor", "pipeline", "context", "expert", "micro", "chunks", "group", "table", "row")


@dataclass(frozen=True)
class Plan:
    """A parallelisation plan: mesh axes, schedule, recomputation and offload tiers of a model.

    Attributes:
        data, tensor, pipeline, context, expert: sizes of the axes; GPUs = data tensor pipeline context (experts lie on
            the data axis, so ``expert`` divides ``data``).
        micro: samples per micro-batch and data-parallel group.
        zero: 0 nothing sharded over the data axis, 1 optimiser state, 2 and gradients, 3 and parameters (FSDP).
        schedule, chunks: pipeline schedule; layer chunks per stage when interleaved.
        recompute: what the backward pass computes again. sequence_parallel: norms and dropout divided by the tensor
        axis. parameters, gradients, optimizer, activations: the tier each tensor class lives in.
        group: micro-batches that run through a layer before the next layer: 1 is activation-resident scheduling, all of
            them parameter-resident, between them mixed.  Matters only with offload.
        table, row: embedding-table parallelism: data-parallel ranks that hold different tables (table-wise sharding),
            and ranks over which the rows of each are dealt (row-wise); table x row divides ``data``.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    parameters: str = "gpu"
    gradients: str = "gpu"
    optimizer: str = "gpu"
    activations: str = "gpu"
    group: int = 1
    table: int = 1
    row: int = 1

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r} must be a whole number >= 1", **{name: value})
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero={self.zero!r} must be 0, 1, 2 or 3", zero=self.zero)
        choices = {"schedule": SCHEDULES, "recompute": RECOMPUTE}
        choices |= dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), TIERS)
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown: choose one of {known}", name=name)
        if self.data % self.expert:
            raise UsageError(f"expert={self.expert} must divide data={self.data}", expert=self.expert, data=self.data)
        if self.data % (self.table * self.row):
            raise UsageError(
                f"table={self.table} x row={self.row} must divide data={self.data}", table=self.table, row=self.row
            )

    @property
    def gpus(self) -> int:
        """GPUs that the plan takes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def streams(self) -> bool:
        """Whether parameters, gradients or activations pass between tiers, so that the scheduling policy matters."""
        return {self.parameters, self.gradients, self.activations} != {"gpu"}

    @property
    def policy(self) -> str:
        """Scheduling policy in the thesis' words, or ``resident`` without offload."""
        if not self.streams:
            return "resident"
        return "activation-resident" if self.group == 1 else f"parameter-resident ({self.group} micro-batches)"

    def describe(self) -> str:
        """One line, only what differs from the default.

        >>> Plan(data=2, tensor=4, micro=2, recompute="full").describe()
        'data 2 tensor 4 micro 2 recompute full'
        """
        default = Plan()
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(default, field.name) or field.name == "micro":
                shown.append(field.name.replace("_", "-") if value is True else f"{field.name} {value}")
        return " ".join(shown)

    def short(self) -> str:
        """A few words: axes (d data, t tensor, p pipeline, c context, e expert, b micro-batch), then what is not the
        default.

        >>> Plan(data=16, pipeline=2, micro=2, zero=1, recompute="full", optimizer="host").short()
        'd16 p2 b2, zero 1, 1f1b, full recompute, O to host'
        """
        axes = zip("dtpce", (self.data, self.tensor, self.pipeline, self.context, self.expert), strict=True)
        shown = [" ".join([f"{name}{size}" for name, size in axes if size > 1] + [f"b{self.micro}"])]
        if self.table > 1:
            shown.append(f"tables over {self.table}")
        if self.row > 1:
            shown.append(f"rows over {self.row}")
        if self.zero:
            shown.append(f"zero {self.zero}")
        if self.pipeline > 1:
            shown.append(self.schedule + (f" x{self.chunks}" if self.chunks > 1 else ""))
        if self.recompute != "none":
            shown.append(f"{self.recompute} recompute")
        if self.sequence_parallel:
            shown.append("sequence parallel")
        for tier in TIERS[1:]:
            gone = [
                name[0].upper()
                for name in ("parameters", "gradients", "optimizer", "activations")
                if getattr(self, name) == tier
            ]
            if gone:
                shown.append(f"{''.join(gone)} to {tier}")
        if self.group > 1:
            shown.append(f"groups of {self.group}")
        return ", ".join(shown)

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, object]) -> Plan:
        """The inverse of ``to_json``.  Raises: UsageError for unknown keys or impossible values."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise UsageError(f"a plan has no {sorted(unknown)}", unknown=sorted(unknown))
        return cls(**values)  # type: ignore[arg-type]


_CODED = {"schedule": SCHEDULES, "recompute": RECOMPUTE} | dict.fromkeys(
    ("parameters", "gradients", "optimizer", "activations"), TIERS
)


KIND = (
    *("data", "tensor", "pipeline", "context", "expert", "table", "row", "micro", "schedule", "recompute"),
    *("parameters", "gradients", "optimizer", "activations"),
)
"""Settings that make plans different to a reader; chunks, group, ZeRO stage and sequence parallelism make variants."""


class Plans:
    """Many plans as a struct of arrays: one integer array per field of ``Plan``; names are coded by their position in
    the lists above.
    """

    def __init__(self, **columns: NDArray[np.integer] | int) -> None:
        arrays = np.broadcast_arrays(*(np.asarray(column) for column in columns.values()))
        self.columns: dict[str, NDArray] = dict(zip(columns, arrays, strict=True))
        for field in fields(Plan):
            if field.name not in self.columns:
                default = field.default
                code = _CODED[field.name].index(str(default)) if field.name in _CODED else int(default)  # type: ignore[call-overload]
                self.columns[field.name] = np.full(arrays[0].shape, code)

    def __getitem__(self, name: str) -> NDArray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["data"])

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> Plans:
        """From single plans."""
        plans = list(plans)
        columns: dict[str, NDArray] = {}
        for field in fields(Plan):
            values = [getattr(plan, field.name) for plan in plans]
            known = _CODED.get(field.name)
            columns[field.name] = np.array([known.index(v) for v in values] if known else values, dtype=np.int64)
        return cls(**columns)

    def codes(self, index: NDArray, names: Sequence[str]) -> NDArray[np.int64]:
        """A number per plan at some positions, equal where the named settings are (``KIND``: variants of one plan)."""
        code = np.zeros(len(index), dtype=np.int64)
        for name in names:
            column = self.columns[name][index]
            _, position = np.unique(column, return_inverse=True)
            code = code * (int(position.max(initial=0)) + 1) + position
        return code

    def take(self, index: NDArray) -> Plans:
        """The plans at some positions (or where a mask holds)."""
        return Plans(**{name: column[index] for name, column in self.columns.items()})

    def plan(self, index: int) -> Plan:
        """One of them."""
        values: dict[str, object] = {}
        for field in fields(Plan):
            value = int(self.columns[field.name][index])
            known = _CODED.get(field.name)
            values[field.name] = known[value] if known else bool(value) if field.name == "sequence_parallel" else value
        return Plan(**values)  # type: ignore[arg-type]
