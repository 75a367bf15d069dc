"""Compares jcuts.optimize with jax.jit on a keras network with random weights, in one run on this machine."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import MODES, TUNE, Settings
from jcuts.cli.printing import console, duration, table

HELP = "jcuts against jax.jit on a real network"


class Network(NamedTuple):
    """A network as a pure function of its weights and a batch of images."""

    name: str
    apply: Callable[[Any, Any], Any]
    weights: Any
    images: np.ndarray
    reference: Callable[[], np.ndarray]
    """Makes the float64 result; costly, and leaves keras in float64, so last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", default="MobileNetV2", help="network of keras.applications; default: %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="images per call; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=6, help="how long to measure; default: %(default)s")
    parser.add_argument("--mode", choices=MODES, default=Settings().mode, help="default: %(default)s")
    parser.add_argument("--tune", choices=TUNE, default=Settings().tune, help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Prints medians, errors and a summary of what was done; 0 also when jcuts leaves everything to XLA."""
    if arguments.batch < 1 or not arguments.seconds > 0:
        raise UsageError(
            f"--batch {arguments.batch} must be >= 1 and --seconds {arguments.seconds} > 0", batch=arguments.batch
        )
    out = console()
    out.print(f"making {arguments.network} with random weights (about 10 s) ...")
    network = build(arguments.network, arguments.batch)

    import jax

    import jcuts
    from jcuts.report.rich_tables import report_tables

    out.print(f"{network.name}, batch {arguments.batch}, float32, random weights, on {jax.devices()[0].device_kind}")
    images = jax.numpy.asarray(network.images)
    plain = jax.jit(network.apply)
    ours = jcuts.optimize(network.apply, mode=arguments.mode, tune=arguments.tune)
    if arguments.tune == "auto" and not knobs.current().disable:
        out.print(
            "jcuts measures kernels in its first call: minutes the first time, seconds afterwards "
            f"(kept in {knobs.current().cache_dir}; JCUTS_MAX_CANDIDATES=2 or --tune cached make it shorter)"
        )
    results, first = {}, {}
    patience = math.inf if knobs.current().first_call_seconds is None else knobs.current().first_call_seconds
    for name, fn in (("jax.jit", plain), ("jcuts.optimize", ours)):
        start = time.perf_counter()
        with knobs.scope(first_call_seconds=patience):  # it waits for the end: what was chosen is timed below
            results[name] = np.asarray(fn(network.weights, images))
        first[name] = time.perf_counter() - start
        out.print(f"  {name}: first call {duration(first[name])}")
    out.print(f"timing both for {arguments.seconds:.0f} s, then the float64 reference (about 20 s) ...")
    times = interleave({"jax.jit": plain, "jcuts.optimize": ours}, (network.weights, images), arguments.seconds)
    report = ours.explain(network.weights, images)
    reference = network.reference()
    rows = []
    base = float(np.median(times["jax.jit"]))
    for name, samples in times.items():
        median = float(np.median(samples))
        low, high = np.percentile(samples, [10, 90])
        rows.append(
            (
                name,
                duration(median),
                f"{duration(low)} .. {duration(high)}",
                f"{base / median:.2f}x",
                f"{np.abs(results[name] - reference).max():.2e}",
                duration(first[name]),
            )
        )
    columns = ("", "median", "10% .. 90%", "speed", "largest error", "first call")
    out.print(table(f"{network.name}, {len(times['jax.jit'])} interleaved calls", columns, rows, right=(1, 2, 3, 4, 5)))
    out.print(f"errors are against float64; outputs are at most {np.abs(reference).max():.2e}")
    out.print(report_tables(report))
    if knobs.current().disable:
        out.print("JCUTS_DISABLE is set: jcuts left everything to XLA")
    return 0


def build(name: str, batch: int, *, seed: int = 0) -> Network:
    """A network of ``keras.applications`` with random weights and random images; nothing is downloaded.

    Raises:
        UsageError: keras is missing, or there is no such network.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import keras
    except ImportError as error:
        raise UsageError(f"keras cannot be imported ({error}): pip install 'jcuts[demo]'") from error
    if keras.backend.backend() != "jax":
        raise UsageError(
            f"keras runs on {keras.backend.backend()}: the demo needs KERAS_BACKEND=jax",
            backend=keras.backend.backend(),
        )
    maker = getattr(keras.applications, name, None)
    if not callable(maker):
        known = sorted(n for n in dir(keras.applications) if n[:1].isupper())
        raise UsageError(f"keras.applications has no {name!r}: choose one of {', '.join(known)}", network=name)

    keras.utils.set_random_seed(seed)
    model: Any = maker(weights=None)
    # Moving averages start at 0 and 1, which would let batch normalisation vanish.
    random = np.random.default_rng(seed)
    for variable in model.non_trainable_variables:
        value = np.asarray(variable)
        if value.dtype == np.float32:
            noise = random.uniform(-0.2, 0.2, value.shape).astype(np.float32)
            variable.assign(value + noise)
    trainable = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    images = random.uniform(-1.0, 1.0, (batch, *model.input_shape[1:])).astype(np.float32)

    def apply(weights: Any, images: Any) -> Any:
        return model.stateless_call(weights[0], weights[1], images, training=False)[0]

    apply.__name__ = name

    def reference() -> np.ndarray:
        import jax

        kept = model.get_weights()
        with jax.enable_x64(True):
            before = keras.config.floatx()
            keras.config.set_floatx("float64")
            keras.config.set_dtype_policy("float64")
            try:
                wide: Any = maker(weights=None)
                wide.set_weights(kept)
                return np.asarray(wide(images.astype(np.float64), training=False))
            finally:
                keras.config.set_floatx(before)
                keras.config.set_dtype_policy(before)

    return Network(name, apply, (trainable, fixed), images, reference)


def interleave(
    functions: dict[str, Callable[..., Any]], arguments: tuple[Any, ...], seconds: float, *, least: int = 5
) -> dict[str, list[float]]:
    """Times functions in interleaved order, so that clock changes and other load affect all alike.

    Args:
        functions: by name, already compiled.
        arguments: of every call.
        seconds: total time to spend [s].
        least: calls of each, however long they take.
    Returns: seconds per call, by name, equally many of each.
    """
    import jax

    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < least or time.perf_counter() < end:
        for name, fn in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(fn(*arguments))
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times
