"""Training steps in float32 and float64 on learnable data: coarse patterns in noise, Markov chains of tokens.

A network is a small one for CPUs (`SMALL`) or a row NAME:BATCH of the registry of workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.networks.compiled_program import Stepped
from benchmarks.networks.workloads import WORKLOADS, Form, Program
from benchmarks.networks.workloads.gpt import gpt_training
from benchmarks.networks.workloads.keras_cnn import cnn_training
from benchmarks.networks.workloads.small_training import resnet18_training

CLASSES = 10
"""Classes of images and symbols of sequences; a network may have more of them than occur."""
MISLABELLED = 0.2
"""Share of labels, and of tokens, that are random: the loss falls, and does not vanish."""
CONTRAST = 0.3
"""Of prototypes of images, over the deviation of the noise."""
COARSE = 4
"""Points of a prototype in each direction."""
DRY_BATCH = 4
"""Batch of a dry run: batch norms of fewer images divide by next to nothing."""
GPUS = ("MobileNetV2_training:64", "ResNet50_training:64", "GPT_training:8")
"""Default networks on a GPU."""


@dataclass(frozen=True)
class Network:
    """A training step by its name, batch and builder (called with batch, ``dtype`` and ``tiny``).

    Args: wide: whether it can be built in float64; keras' type promotion knows no float64 on JAX.
    """

    name: str
    batch: int
    builder: Callable[..., Program]
    wide: bool = True

    @classmethod
    def parse(cls, text: str) -> Network:
        """One of `SMALL`, or NAME:BATCH of the registry. Raises: ValueError: neither."""
        if text in SMALL:
            return SMALL[text]
        name, _, batch = text.partition(":")
        spec = WORKLOADS.get(name)
        if spec is None or spec.kind != "training" or not batch.isdigit():
            raise ValueError(f"{text!r} is no network: {', '.join(SMALL)}, or NAME:BATCH of a training step")
        return cls(name, int(batch), lambda batch, dtype, tiny: spec.build(batch, dtype=dtype, tiny=tiny), False)

    @property
    def stem(self) -> str:
        """Name for files."""
        return f"{self.name}_{self.batch}"

    def form(self, dtype: str = "float32", *, dry: bool = False) -> Form:
        """The step and its arguments. Args: dry: tiny sizes."""
        return self.builder(min(self.batch, DRY_BATCH) if dry else self.batch, dtype=dtype, tiny=dry).form(closed=False)


MOBILENET = {"size": 64, "alpha": 0.25, "dropout": 0.0, "classes": CLASSES}
"""A quarter of the channels, images of 64x64."""
SMALL = {
    network.name: network
    for network in (
        Network("MobileNet_small", 8, partial(cnn_training, "MobileNet", **MOBILENET), wide=False),
        Network("GPT_small", 8, partial(gpt_training, sizes=(2, 128, 4, 64, 512))),
        Network("ResNet18_small", 16, partial(resnet18_training, divisor=4)),
    )
}
"""Networks that are quick on a CPU."""


def data_of(form: Form) -> tuple[Any, ...]:
    """Arguments that are neither weights nor carried: a batch."""
    return form.arguments[form.first + form.carried :]


def batches(form: Form, count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Learnable batches of the step's shapes: images and labels, or tokens; equal in every process."""
    import jax
    import numpy as np

    rng = np.random.default_rng(seed)
    data = data_of(form)
    make = partial(tokens, rng.permutation(CLASSES)) if len(data) == 1 else partial(images, prototypes(rng, data[0]))
    return [tuple(map(jax.numpy.asarray, make(rng, data[0].shape))) for _ in range(count)]


def prototypes(rng: Any, images: Any) -> Any:
    """A coarse pattern per class, as large as an image."""
    import numpy as np

    shape = images.shape[1:]
    found = np.float32(CONTRAST) * rng.standard_normal((CLASSES, *(min(COARSE, n) for n in shape)), np.float32)
    for axis, size in enumerate(shape, 1):
        found = found.take(np.arange(size) * found.shape[axis] // size, axis)
    return found


def images(prototypes: Any, rng: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Prototypes of classes in noise, and labels, some of which are random."""
    import numpy as np

    classes, others = rng.integers(0, CLASSES, (2, shape[0]))
    labels = np.where(rng.random(shape[0]) < MISLABELLED, others, classes)
    return prototypes[classes] + rng.standard_normal(shape, np.float32), labels.astype(np.int32)


def tokens(following: Any, rng: Any, shape: tuple[int, ...]) -> tuple[Any]:
    """Sequences in which a symbol's successor is a fixed one, or, seldom, a random one."""
    import numpy as np

    drawn, strays = rng.integers(0, CLASSES, shape), rng.random(shape) < MISLABELLED
    for k in range(1, shape[1]):
        drawn[:, k] = np.where(strays[:, k], drawn[:, k], following[drawn[:, k - 1]])
    return (drawn.astype(np.int32),)


@dataclass
class Training(Stepped):
    """A step with the batches that it goes through over and over; the loss is the last of its results."""

    batches: Sequence[tuple[Any, ...]]
    taken: int = 0

    def step(self) -> Any:
        """One step on the next batch."""
        end = self.form.first + self.form.carried
        self.arguments = (*self.arguments[:end], *self.batches[self.taken % len(self.batches)])
        self.taken += 1
        return super().step()


def program(name: str, form: Form, mode: str = "mixed", tune: str = "auto") -> Callable[..., Any]:
    """The step by ``jax.jit`` or by ``jcuts``, with its arguments donated. Args: mode, tune: of `jcuts.optimize`."""
    import jax

    if name == "jax.jit":
        return jax.jit(form.function, donate_argnums=form.donated)
    import jcuts

    return jcuts.optimize(form.function, mode=mode, tune=tune, donate_argnums=form.donated)


def chosen(call: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What jcuts runs: the program that won, why, whether tuning is complete, and its kernels."""
    decision = call.decision(*arguments)
    return {
        "chosen": decision and decision.chosen,
        "reason": decision and decision.reason,
        "partial": bool(decision and decision.partial),
        "kernels": call.explain(*arguments).kernels,
    }
