"""Speech recognition models (DeepSpeech2) as layers: convolutions over time and frequency, bidirectional recurrent
layers.
"""

from __future__ import annotations

from jcuts.plan.spec import toml_file
from jcuts.plan.spec.layers import BYTES, Block, Gemm, Model, Stream


def _recurrent(name: str, count: int, inputs: int, hidden: int, gates: int, steps: int) -> Block:
    """A bidirectional recurrent layer whose directions add up: input products of all steps at once, a recurrent product
    per step and direction, and the gates' element-wise work."""
    moved = BYTES * float(steps * gates * hidden * 2)
    return Block(
        name,
        count,
        (
            Gemm("inputs", steps, gates * hidden, inputs, copies=2),
            Gemm("recurrence", 1, gates * hidden, hidden, copies=2 * steps),
            Stream("gates", 2 * moved, 4 * moved, "no", 2 * steps, 2 * steps),
        ),
        replicated=2.0 * gates * hidden * (inputs + hidden + 2),
        saved_replicated=2 * moved,
        boundary=BYTES * float(steps * hidden),
    )


def from_table(table: toml_file.Table) -> Model:
    """A DeepSpeech2 from its TOML table: ``frames`` and ``frequencies`` of a sample, ``[[convolutions]]`` with windows,
    strides and paddings as [frequency, time], ``layers`` of ``hidden`` values with ``gates`` (3: GRU, 4: LSTM, 1:
    plain), ``classes``.

    Source: arXiv 1512.02595, section 3.  Raises: ModelError with file, line and key.
    """
    name, batch = table.text_of("name"), table.integer("batch", 1)
    high, steps = table.integer("frequencies"), table.integer("frames")
    hidden, layers, gates = table.integer("hidden"), table.integer("layers"), table.integer("gates", 3)
    classes, channels = table.integer("classes"), 1
    operations: list[Gemm | Stream] = []
    parameters = kept = 0.0
    for entry in table.tables("convolutions"):
        filters = entry.integer("channels")
        window, stride, padding = (entry.integers(key, 2) for key in ("window", "stride", "padding"))
        entry.done()
        high = (high + 2 * padding[0] - window[0]) // stride[0] + 1
        steps = (steps + 2 * padding[1] - window[1]) // stride[1] + 1
        inner, moved = channels * window[0] * window[1], BYTES * float(high * steps * filters)
        operations.append(Gemm("convolution", high * steps, filters, inner))
        operations.append(Stream("norm, clipped relu", 4 * moved, 6 * moved, "no", 3, 3))
        parameters += inner * filters + 2 * filters
        kept += 2 * moved
        channels = filters
    table.done()
    features = channels * high
    front = Block(
        "convolutions",
        1,
        tuple(operations),
        replicated=parameters,
        saved_replicated=kept,
        boundary=2.0 * features * steps,
    )
    body = [_recurrent("first recurrent layer", 1, features, hidden, gates, steps)]
    if layers > 1:
        body.append(_recurrent("recurrent layer", layers - 1, hidden, hidden, gates, steps))
    logits = Stream("CTC loss", 8.0 * steps * classes, 16.0 * steps * classes, "no", 2, 2)
    head = Block(
        "classifier",
        1,
        (Gemm("dense", steps, classes, hidden), logits),
        replicated=float(hidden * classes + classes),
        boundary=BYTES * float(steps * classes),
    )
    return Model(name, (front, *body), head=head, batch=batch, sample="utterance")
