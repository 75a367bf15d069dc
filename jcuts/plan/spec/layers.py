"""Layer specification of a model: blocks of operations, and how each is divided over the mesh axes.

A block is what repeats (a transformer layer, a residual stage).  Sizes are per *sample* (one sequence, one image); the
micro-batch, tensor, context and expert axes divide them when they are costed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

BYTES = 2
"""Bytes of a 16-bit value."""


@dataclass(frozen=True)
class Gemm:
    """``batch`` GEMMs (m x k) (k x n); forward one, backward two (one per operand that needs a gradient).

    Attributes:
        tensor: which extent the tensor axis divides: ``n`` (column parallel), ``k`` (row parallel), ``batch`` (heads),
            or ``none`` (every GPU of the axis does it all).
        per_sample: which extent grows with the micro-batch: ``m`` (rows) or ``batch``.
        inner: part of the attention core (what selective recomputation does again).
        expert: one of the ``experts`` of a mixture; rows then are those of all chosen experts.
        copies: number of such products in the block.
        gradient: products in the backward pass (2, or 1 when an operand needs none).
        bytes: of an operand's value: 2, or 4 (float32, multiplied as TF32 at half the speed, XLA's default).
    """

    name: str
    m: float
    n: float
    k: float
    batch: float = 1.0
    tensor: str = "none"
    per_sample: str = "m"
    inner: bool = False
    expert: bool = False
    copies: int = 1
    gradient: int = 2
    bytes: int = BYTES


@dataclass(frozen=True)
class Stream:
    """A memory-bound operation: bytes moved and kernels launched, forward and backward.

    ``tensor``: ``yes`` (the tensor axis divides it), ``sequence`` (only with sequence parallelism), ``no``.
    """

    name: str
    forward: float
    backward: float
    tensor: str = "no"
    kernels: float = 1.0
    kernels_backward: float = 1.0
    inner: bool = False


@dataclass(frozen=True)
class Block:
    """``count`` equal layers.

    Attributes:
        parameters: values that the tensor axis divides; replicated: values that it does not; expert_parameters: values
            divided by the expert axis too.
        saved_tensor / saved_replicated / saved_inner: bytes kept per sample from forward to backward: divided by the
            tensor axis; divided only with sequence parallelism; the attention core's (divided; dropped by selective
            recomputation).
        autodiff_tensor / autodiff_replicated / autodiff_inner: the same as JAX's derivative of every equation keeps it
            (None: no difference).
        boundary: bytes per sample that the layer hands to the next (what full recomputation keeps).
        reductions: all-reduces of ``boundary`` over the tensor axis in a forward pass (backward: the same number).
        exchanges: all-to-alls over the expert axis in a forward pass, each of ``exchange_bytes`` per sample.
        context_bytes: bytes per sample that travel the context axis in a forward pass (keys and values).
        tables: values of each embedding table, divided by the table and row axes.
    """

    name: str
    count: int
    operations: tuple[Gemm | Stream, ...]
    parameters: float = 0.0
    replicated: float = 0.0
    expert_parameters: float = 0.0
    saved_tensor: float = 0.0
    saved_replicated: float = 0.0
    saved_inner: float = 0.0
    autodiff_tensor: float | None = None
    autodiff_replicated: float | None = None
    autodiff_inner: float | None = None
    boundary: float = 0.0
    reductions: int = 0
    exchanges: int = 0
    exchange_bytes: float = 0.0
    context_bytes: float = 0.0
    tables: tuple[float, ...] = ()

    @property
    def total_parameters(self) -> float:
        """Parameters of one of the ``count`` layers."""
        return self.parameters + self.replicated + self.expert_parameters + sum(self.tables)

    def kept(self, autodiff: bool) -> tuple[float, float, float]:
        """Bytes kept per sample: divided by the tensor axis, replicated, of the attention core (divided)."""
        saved = (self.saved_tensor, self.saved_replicated, self.saved_inner)
        derived = (self.autodiff_tensor, self.autodiff_replicated, self.autodiff_inner)
        pairs = zip(saved, derived, strict=True)
        return tuple(own if other is None or not autodiff else other for own, other in pairs)  # type: ignore[return-value]

    @property
    def forward_flops(self) -> float:
        """Matrix FLOPs of one layer's forward pass per sample."""
        return sum(2.0 * op.m * op.n * op.k * op.batch * op.copies for op in self.operations if isinstance(op, Gemm))


@dataclass(frozen=True)
class Model:
    """A network for the planner.

    ``blocks`` follow each other; ``embed`` belongs to the first stage, ``head`` (logits and loss) to the last.
    ``tied``: head and embedding share parameters (their gradients are reduced between first and last stage).
    ``lookup_pooled``, ``lookup_rows``: bytes per sample that embedding tables give, after pooling and before it.
    ``casts``: share of the parameters that software with casts (``Training.cast_traffic``) casts in every micro-batch.
    """

    name: str
    blocks: tuple[Block, ...]
    embed: Block | None = None
    head: Block | None = None
    tied: bool = False
    batch: int = 1
    sample: str = "sequence"
    tensor_limit: int = 1
    context_limit: int = 1
    experts: int = 1
    hidden: int = 0
    sequence: int = 1
    cache_bytes: float = 0.0
    lookup_pooled: float = 0.0
    lookup_rows: float = 0.0
    casts: float = 1.0
    details: dict[str, object] = field(default_factory=dict, compare=False)

    @cached_property
    def tables(self) -> tuple[float, ...]:
        """Values of every embedding table that the table and row axes may divide, largest first."""
        blocks = [*self.blocks, *(block for block in (self.embed, self.head) if block is not None)]
        return tuple(sorted((size for b in blocks for size in b.tables * b.count), reverse=True))

    def largest_share(self, over: int) -> float:
        """Fraction of all table values on the fullest of ``over`` ranks, tables dealt out whole: largest first, each to
        the emptiest rank (Graham, "Bounds on multiprocessing timing anomalies", 1969)."""
        held = [0.0] * over
        for size in self.tables:
            held[held.index(min(held))] += size
        return max(held) / sum(held) if self.tables else 1.0

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(block.count for block in self.blocks)

    @property
    def total_parameters(self) -> float:
        """All parameters; tied ones once."""
        body = sum(block.count * block.total_parameters for block in self.blocks)
        edges = [block.total_parameters for block in (self.embed, self.head) if block is not None]
        return body + (max(edges) if self.tied and edges else sum(edges))

    @property
    def heaviest(self) -> float:
        """Fraction of the body's FLOPs in its heaviest layer: a lower bound for every stage."""
        total = sum(block.count * block.forward_flops for block in self.blocks)
        return max(block.forward_flops for block in self.blocks) / total if total else 0.0

    @property
    def forward_flops(self) -> float:
        """Matrix FLOPs of a forward pass per sample."""
        edges = sum(block.forward_flops for block in (self.embed, self.head) if block is not None)
        return sum(block.count * block.forward_flops for block in self.blocks) + edges


def transformer_layer(
    *,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    sequence: int,
    count: int,
    gated: bool,
    flash: bool,
    dropout: bool,
    experts: int,
    chosen: int,
    head_size: int,
) -> Block:
    """A pre-norm transformer layer.

    Matrix products per token: QKV h (q + 2 kv), scores and context 2 s q, projection q h, feed-forward 2 h f (3 gated);
    memory traffic of the kernels between them (layer norm, bias, GELU, softmax, dropout, residual), each tensor read
    and written once per kernel; activations kept as counted by Korthikanti et al. (arXiv 2205.05198, section 4.1):
    s b h (10 + 24/t + 5 a s/(h t)) for a classical layer.

    JAX's derivative keeps what each equation needs (16-bit layer, norms and softmax in 32 bits, no dropout):
    s b (28 h + 16 + (4 q + 4 kv + 12 f + 6 a s + 8 a)/t).  A norm keeps three 32-bit values and its 16-bit result
    (14 h); attention its operands and result; a softmax its 32-bit exponentials and 16-bit weights, 32-bit maxima and
    sums; a GELU (tanh) or a gated SiLU six 16-bit values (the GELU five from JAX 0.11 on, which is not counted: plans
    hold for either).  Dropout adds a byte per value, and in attention its 16-bit result.  ``flash``: of the attention
    core 32-bit sums alone.
    """
    s, h = float(sequence), float(hidden)
    q, kv = float(heads * head_size), float(kv_heads * head_size)
    wide = 2 * ffn if gated else ffn
    moe = experts > 1
    rows = s * chosen if moe else s
    hidden_bytes, scores = BYTES * s * h, BYTES * heads * s * s
    ops: list[Gemm | Stream] = [
        Stream("layer norm 1", 2 * hidden_bytes, 4 * hidden_bytes, "sequence", 1, 2),
        Gemm("qkv", s, q + 2 * kv, h, tensor="n"),
        Stream("qkv bias, transpose", 2 * BYTES * s * (q + 2 * kv), 2 * BYTES * s * (q + 2 * kv), "yes", 3, 3),
        Gemm("scores", s, s, head_size, heads, "batch", "batch", inner=True),
        Gemm("context", s, head_size, s, heads, "batch", "batch", inner=True),
        Stream("merge heads", 2 * BYTES * s * q, 2 * BYTES * s * q, "yes", 1, 1),
        Gemm("projection", s, h, q, tensor="k"),
        Stream("bias, dropout, residual 1", 3.5 * hidden_bytes, 2.5 * hidden_bytes, "sequence", 1, 2),
        Stream("layer norm 2", 2 * hidden_bytes, 4 * hidden_bytes, "sequence", 1, 2),
        Gemm("feed-forward up", rows, wide, h, tensor="n", expert=moe),
        Stream("bias, activation", BYTES * rows * (wide + ffn), BYTES * rows * (2 * wide + ffn), "yes", 1, 2),
        Gemm("feed-forward down", rows, h, ffn, tensor="k", expert=moe),
        Stream("bias, dropout, residual 2", 3.5 * hidden_bytes, 2.5 * hidden_bytes, "sequence", 1, 2),
    ]
    if not flash:
        ops.insert(4, Stream("scale, mask, softmax", 2 * scores, 3 * scores, "yes", 1, 1, inner=True))
        if dropout:
            ops.insert(5, Stream("attention dropout", 2.5 * scores, 2.5 * scores, "yes", 1, 1, inner=True))
    if moe:
        ops.append(Gemm("router", s, experts, h))
        ops.append(Stream("dispatch, combine", 4 * BYTES * rows * h, 4 * BYTES * rows * h, "sequence", 4, 4))
    score_bytes = (2.5 if dropout else 1.0) * scores if not flash else 4.0 * heads * s
    core_bytes = ((9.0 if dropout else 6.0) * heads * s * s + 8.0 * heads * s) if not flash else 4.0 * heads * s
    mlp_parameters = h * (wide + ffn) + wide + h
    attention_parameters = h * (q + 2 * kv) + q * h + q + 2 * kv
    return Block(
        name="transformer layer",
        count=count,
        operations=tuple(ops),
        parameters=attention_parameters + (0.0 if moe else mlp_parameters),
        replicated=5 * h + (h * experts if moe else 0.0),
        expert_parameters=experts * mlp_parameters if moe else 0.0,
        saved_tensor=BYTES * s * (2 * q + 2 * kv) + BYTES * rows * (wide + ffn),
        saved_replicated=(2 + 1 + 1 + 4) * s * h + BYTES * rows * h,
        saved_inner=score_bytes,
        autodiff_tensor=BYTES * s * (2 * q + 2 * kv) + 6 * BYTES * rows * ffn,
        autodiff_replicated=(28 + (2 if dropout else 0)) * s * h + 16 * s + (BYTES * rows * h if moe else 0.0),
        autodiff_inner=core_bytes,
        boundary=hidden_bytes,
        reductions=2,
        exchanges=2 if moe else 0,
        exchange_bytes=BYTES * rows * h,
        context_bytes=2 * BYTES * s * kv,
    )


def vocabulary_head(*, hidden: int, vocabulary: int, sequence: int, dense: float = 0.0, divided: bool = True) -> Block:
    """Final norm, logits and the cross-entropy, whose logits are kept in 32 bits as Megatron does.

    ``divided``: the tensor axis divides the vocabulary; otherwise every GPU of it does the whole head.
    """
    s, h = float(sequence), float(hidden)
    split, kept = h * vocabulary + dense, 4 * s * vocabulary
    ops = (
        Stream("final norm", 2 * BYTES * s * h, 4 * BYTES * s * h, "sequence", 1, 2),
        Gemm("logits", s, vocabulary, h, tensor="n" if divided else "none"),
        Stream(
            "cross entropy",
            (BYTES + 4 * 4) * s * vocabulary,
            (2 * 4 + BYTES) * s * vocabulary,
            "yes" if divided else "no",
            8,
            4,
        ),
    )
    return Block(
        "head",
        1,
        ops,
        parameters=split if divided else 0.0,
        replicated=2 * h + (0.0 if divided else split),
        boundary=BYTES * s * h,
        saved_tensor=kept if divided else 0.0,
        saved_replicated=4 * s * h + (0.0 if divided else kept),
        reductions=1 if divided else 0,
    )


def embedding(*, hidden: int, vocabulary: int, positions: int, sequence: int, divided: bool = True) -> Block:
    """Token (tensor-divided, or not) and position (replicated) embedding with dropout."""
    s, h = float(sequence), float(hidden)
    table = h * vocabulary
    ops = (Stream("embedding", 6 * BYTES * s * h, 6 * BYTES * s * h, "no", 4, 4),)
    return Block(
        "embedding",
        1,
        ops,
        parameters=table if divided else 0.0,
        replicated=h * positions + (0.0 if divided else table),
        boundary=BYTES * s * h,
        saved_replicated=s * h,
        reductions=1 if divided else 0,
    )
