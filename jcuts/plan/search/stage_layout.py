"""Layout of a pipeline: which GPUs have which whole layers, and in which memory tier each layer's tensors lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from jcuts.plan.cost.inference import ServingCost
from jcuts.plan.search.plan import TIERS, Plan
from jcuts.plan.search.tier_placement import Placement

Ranges = tuple[tuple[int, int], ...]
"""First and last number of each stretch of layers, from 0."""


@dataclass(frozen=True)
class Held:
    """A class of tensors of some layers in one tier; ``bytes``: per GPU."""

    tensors: str
    tier: str
    layers: Ranges
    bytes: float


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: ``gpus`` first and last rank, ``layers``, and what is held where."""

    gpus: tuple[int, int]
    layers: Ranges
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Layout:
    """Stages in order; of ``replicas`` data-parallel replicas of ``width`` GPUs each, those of the first."""

    stages: tuple[Stage, ...]
    replicas: int
    width: int

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)

    def rows(self, *, brief: bool = False) -> list[tuple[str, ...]]:
        """(GPUs, layers, tensors, tier, layers there, GiB per GPU) as text; what repeats is left out.

        ``brief``: of a stage that divides its layers as the stage before does, only which layers those are.
        """
        made: list[tuple[str, ...]] = []
        before = None
        for stage in self.stages:
            shape = [(held.tensors, held.tier, sum(b - a for a, b in held.layers)) for held in stage.held]
            if brief and shape == before:
                made.append((text([stage.gpus]), text(stage.layers), "as above", "", "", ""))
                continue
            before = shape
            for position, held in enumerate(stage.held):
                where = (text([stage.gpus]), text(stage.layers)) if not position else ("", "")
                inside = "all" if held.layers == stage.layers else text(held.layers)
                made.append((*where, held.tensors, held.tier, inside, f"{held.bytes / 2**30:.2f}"))
        return made

    def note(self) -> str:
        """What the rows leave out."""
        said = "layers and GPUs count from 0; GiB per GPU"
        if self.replicas > 1:
            said += (
                f"; {self.replicas} replicas of {self.width} GPU{'s' * (self.width > 1)} each: GPU numbers of the first"
            )
        return said


COLUMNS = ("GPUs", "layers", "tensors", "tier", "which layers", "GiB")


def of_training(plan: Plan, placed: Placement, layers: int) -> Layout:
    """The layout of a training plan: stages outermost, then data, context and tensor ranks.

    Args: placed: whole layers per class and tier of the fullest stage; layers: of the model.
    """
    width = plan.data * plan.context * plan.tensor
    stages = []
    for number, mine in enumerate(_dealt(layers, plan.pipeline, plan.chunks)):
        held: list[Held] = []
        for name, counts in placed.layers.items():
            held += _split(name, mine, counts, placed.layer_bytes[name])
        stages.append(Stage((number * width, (number + 1) * width - 1), ranges(mine), tuple(held)))
    return Layout(tuple(stages), 1, plan.gpus)


def of_serving(cost: ServingCost, layers: int) -> Layout:
    """The layout of a serving plan: replicas outermost, then stages and tensor ranks; the first layers' weights stay on
    the GPU, the last layers' are streamed."""
    plan, t = cost.plan, cost.plan.tensor
    dealt = _dealt(layers, plan.pipeline, 1)
    most = max(map(len, dealt))
    stages = []
    for number, mine in enumerate(dealt):
        kept = round(plan.weights_on_gpu * most)
        held = _split("weights", mine, {"gpu": kept, plan.weights: most - kept}, cost.held["weights"] / most)
        for name, tier in (("KV cache", plan.cache), ("hidden states", plan.activations)):
            if cost.held[name]:
                held += _split(name, mine, {tier: most}, cost.held[name] / most)
        stages.append(Stage((number * t, (number + 1) * t - 1), ranges(mine), tuple(held)))
    return Layout(tuple(stages), plan.data, plan.pipeline * t)


def _dealt(layers: int, stages: int, chunks: int) -> list[list[int]]:
    """Layers of every stage: ``chunks`` equal stretches each, dealt round (interleaving); the first have more if they
    do not divide."""
    parts = stages * chunks
    sizes = [layers // parts + (part < layers % parts) for part in range(parts)]
    starts = [sum(sizes[:part]) for part in range(parts)]
    stretches = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [[layer for part in range(stage, parts, stages) for layer in stretches[part]] for stage in range(stages)]


def _split(name: str, layers: Sequence[int], counts: Mapping[str, int], layer_bytes: float) -> list[Held]:
    """Deals a stage's layers to tiers, the fastest tier first."""
    made, at = [], 0
    for tier in TIERS:
        mine = layers[at : at + counts.get(tier, 0)]
        at += len(mine)
        if mine:
            made.append(Held(name, tier, ranges(mine), len(mine) * layer_bytes))
    return made


def ranges(numbers: Iterable[int]) -> Ranges:
    """Stretches of rising whole numbers.

    >>> ranges([0, 1, 2, 8, 9])
    ((0, 2), (8, 9))
    """
    made: list[tuple[int, int]] = []
    for number in numbers:
        if made and number == made[-1][1] + 1:
            made[-1] = (made[-1][0], number)
        else:
            made.append((number, number))
    return tuple(made)


def text(stretches: Iterable[tuple[int, int]]) -> str:
    """Stretches for a reader.

    >>> text([(0, 2), (8, 8)])
    '0-2, 8'
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches)
