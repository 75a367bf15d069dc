"""Convolutional networks as layers: residual, bottleneck and inverted-residual stages from a TOML table."""

from __future__ import annotations

from jcuts.plan.spec import toml_file
from jcuts.plan.spec.layers import BYTES, Block, Gemm, Model, Stream

BLOCKS = ("basic", "bottleneck", "inverted")


class Builder:
    """Collects the operations, parameters and kept bytes of one block; sizes are of square images, per sample."""

    def __init__(self, size: int, channels: int) -> None:
        self.size, self.channels = size, channels
        self.operations: list[Gemm | Stream] = []
        self.parameters = self.kept = 0.0

    def convolution(self, name: str, filters: int, window: int = 1, stride: int = 1) -> None:
        """A convolution as an implicit matrix product, its batch norm and activation."""
        self.size = -(-self.size // stride)
        self.operations.append(Gemm(name, float(self.size**2), filters, self.channels * window**2))
        self.parameters += self.channels * filters * window**2
        self.channels = filters
        self._norm(name)

    def depthwise(self, name: str, window: int, stride: int) -> None:
        """A depthwise convolution, which memory bounds: its input and output once each, twice backward."""
        moved = BYTES * float(self.size**2 * self.channels)
        self.size = -(-self.size // stride)
        moved += BYTES * float(self.size**2 * self.channels)
        self.operations.append(Stream(name, moved, 2 * moved))
        self.parameters += self.channels * window**2
        self._norm(name)

    def _norm(self, name: str) -> None:
        """Batch norm and activation: statistics and result, each tensor read and written; both sides are kept."""
        moved = BYTES * float(self.size**2 * self.channels)
        self.operations.append(Stream(f"{name} norm, relu", 4 * moved, 6 * moved, "no", 3, 3))
        self.parameters += 2 * self.channels
        self.kept += 2 * moved

    def block(self, name: str, count: int = 1) -> Block:
        """The block so far."""
        boundary = BYTES * float(self.size**2 * self.channels)
        return Block(
            name,
            count,
            tuple(self.operations),
            replicated=self.parameters,
            saved_replicated=self.kept,
            boundary=boundary,
        )


def _stage_block(kind: str, before: Builder, width: int, expand: int, stride: int) -> Builder:
    """One block of a stage on what the block before it gives."""
    made = Builder(before.size, before.channels)
    if kind == "inverted":
        if expand > 1:
            made.convolution("1x1 expand", expand * before.channels)
        made.depthwise("3x3 depthwise", 3, stride)
        made.convolution("1x1 project", width)
        return made
    wide = 4 * width if kind == "bottleneck" else width
    if kind == "bottleneck":
        made.convolution("1x1 in", width)
        made.convolution("3x3", width, 3, stride)
        made.convolution("1x1 out", wide)
    else:
        made.convolution("3x3 first", width, 3, stride)
        made.convolution("3x3 second", width, 3)
    if stride > 1 or before.channels != wide:
        shortcut = Builder(before.size, before.channels)
        shortcut.convolution("shortcut", wide, 1, stride)
        made.operations += shortcut.operations
        made.parameters += shortcut.parameters
    return made


def from_table(table: toml_file.Table) -> Model:
    """A convolutional network from its TOML table: ``image``, ``classes``, ``[stem]``, ``[[stages]]``, and ``last``,
    the channels of a last 1x1 convolution (0: none).

    Equal blocks of a stage are one block with a count.  Raises: ModelError with file, line and key.
    """
    name, batch = table.text_of("name"), table.integer("batch", 1)
    image, classes, last = table.integer("image"), table.integer("classes"), table.integer("last", 0, zero=True)
    stem = table.table("stem")
    assert stem is not None  # required
    at = Builder(image, stem.integer("inputs", 3))
    at.convolution("stem", stem.integer("channels"), stem.integer("window"), stem.integer("stride", 2))
    at.size //= stem.integer("pool", 1)
    stem.done()
    blocks = [at.block("stem")]
    for entry in table.tables("stages"):
        kind = entry.text_of("block", choices=BLOCKS)
        width, count = entry.integer("width"), entry.integer("count")
        stride, expand = entry.integer("stride", 1), entry.integer("expand", 1)
        entry.done()
        at = _stage_block(kind, at, width, expand, stride)
        blocks.append(at.block(f"{width}-wide {kind}, first"))
        if count > 1:
            at = _stage_block(kind, at, width, expand, 1)
            blocks.append(at.block(f"{width}-wide {kind}", count - 1))
    head = Builder(at.size, at.channels)
    if last:
        head.convolution("1x1 last", last)
    features, found = head.channels, head.block("classifier")
    dense = Gemm("dense", 1, classes, features)
    table.done()
    end = Block(
        "classifier",
        1,
        (*found.operations, dense),
        replicated=head.parameters + features * classes + classes,
        saved_replicated=head.kept,
        boundary=BYTES * float(features),
    )
    return Model(name, tuple(blocks), head=end, batch=batch, sample="image")
