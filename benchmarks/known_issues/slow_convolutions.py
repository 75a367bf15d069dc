"""Convolutions that users of JAX report as slow: forward pass and gradients under `jax.jit` and under `jcuts.optimize`.

    python benchmarks/known_issues/slow_convolutions.py --out slow_convolutions.json [--small] [CASE ...]

| case | issue of jax-ml/jax |
|---|---|
| transposed | 23783: transposed convolutions, CPU and CUDA |
| transposed_3d | 31662: gradient of a 3-D transposed convolution |
| grouped | 13800: backward pass with feature groups |
| dilated_depthwise | 26266: depthwise convolutions with dilated filters |
| large_filter | 23085: gradients of convolutions with large filters |
| depthwise | 23713: depthwise layers on CPUs |

Every case is a process of its own.  ``--small`` divides batches and images, for CPUs.  Errors are relative L2 errors
against float64 on the same device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.baseline import environment  # noqa: E402
from benchmarks.networks.interleaved_timing import interleaved, ratio  # noqa: E402

Layer = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]
"""A function of an input and weights, and their shapes."""


def channels_last(spatial: int) -> tuple[str, str, str]:
    """Dimension numbers of images, filters and results."""
    letters = "DHW"[-spatial:]
    return f"N{letters}C", f"{letters}IO", f"N{letters}C"


def conv(spatial: int, **options: Any) -> Callable[..., Any]:
    """A convolution, channels last. Args: spatial: dimensions of the image; options: of `jax.lax`."""
    import jax

    options = {"window_strides": (1,) * spatial, "padding": "SAME", **options}
    return functools.partial(jax.lax.conv_general_dilated, dimension_numbers=channels_last(spatial), **options)


def transposed(spatial: int, stride: int) -> Callable[..., Any]:
    """A transposed convolution, channels last."""
    import jax

    return functools.partial(
        jax.lax.conv_transpose, strides=(stride,) * spatial, padding="SAME", dimension_numbers=channels_last(spatial)
    )


CASES: dict[str, Callable[[bool], Layer]] = {
    "transposed": lambda small: (transposed(2, 2), (2 if small else 16, 64, 64, 64), (4, 4, 64, 64)),
    "transposed_3d": lambda small: (transposed(3, 2), (1, *(3 * (16 if small else 64,)), 32), (3, 3, 3, 32, 64)),
    "grouped": lambda small: (conv(1, feature_group_count=64), (2 if small else 32, 1024, 512), (5, 8, 512)),
    "dilated_depthwise": lambda small: (
        conv(1, feature_group_count=256, rhs_dilation=(8,)),
        (4 if small else 32, 1024, 256),
        (5, 1, 256),
    ),
    "large_filter": lambda small: (
        conv(2, window_strides=(16, 16), padding="VALID"),
        (2 if small else 32, 224, 224, 3),
        (16, 16, 3, 768),
    ),
    "depthwise": lambda small: (conv(2, feature_group_count=256), (1, 124, 124, 256), (3, 3, 1, 256)),
}


def functions(layer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The forward pass, and the gradients of both arguments of a loss that looks at every result."""
    import jax
    import jax.numpy as jnp

    def gradients(x: Any, w: Any, target: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum((layer(x, w) - target) ** 2), (0, 1))(x, w)

    return {"forward": lambda x, w, target: layer(x, w), "gradients": gradients}


def error(found: Any, wanted: Any) -> float:
    """Relative L2 error, the largest of all results."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.asarray(f, np.float64), np.asarray(w, np.float64)) for f, w in pairs]
    return max(float(np.linalg.norm(f - w) / np.linalg.norm(w)) for f, w in arrays)


def measure(case: str, small: bool, seconds: float) -> dict[str, Any]:
    """One case, in this process."""
    import jax
    import numpy as np

    import jcuts

    layer, shape, filters = CASES[case](small)
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(s, dtype=np.float32) for s in (shape, filters)]
    out = jax.eval_shape(layer, *made)
    made.append(rng.standard_normal(out.shape, dtype=np.float32))
    arguments = [jax.device_put(a) for a in made]
    row: dict[str, Any] = {"case": case, "input": shape, "filters": filters, **environment()}
    for name, function in functions(layer).items():
        os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # the tuned program is timed
        plain, ours = jax.jit(function), jcuts.optimize(function)
        results = {"jax.jit": plain(*arguments), "jcuts": ours(*arguments)}
        times = interleaved(
            {n: functools.partial(f, *arguments) for n, f in (("jax.jit", plain), ("jcuts", ours))}, seconds
        )
        decision = ours.decision(*arguments)
        row[name] = {
            "times": times,
            "speed-up": ratio(times, "jax.jit", "jcuts"),
            "chosen": decision and decision.chosen,
            "results": {n: jax.tree.map(np.asarray, r) for n, r in results.items()},
        }
    with jax.enable_x64(True):  # on the same device: XLA's CPU code for a 3-D gradient of this size takes a minute
        wide = [np.asarray(a, np.float64) for a in made]
        for name, function in functions(layer).items():
            wanted = jax.jit(function)(*wide)
            row[name]["errors"] = {n: error(r, wanted) for n, r in row[name].pop("results").items()}
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("slow_convolutions.json"))
    parser.add_argument("--small", action="store_true", help="fewer and smaller images")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing per program")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.child:
        options.out.write_text(json.dumps(measure(options.cases[0], options.small, options.seconds), indent=1) + "\n")
        return 0
    rows = []
    for case in options.cases or CASES:
        part = options.out.with_suffix(f".{os.getpid()}.part")
        command = [sys.executable, __file__, "--child", "--out", str(part), "--seconds", str(options.seconds), case]
        code = subprocess.run([*command, *(["--small"] if options.small else [])], check=False).returncode
        rows.append(json.loads(part.read_text()) if code == 0 else {"case": case, "failed": code})
        part.unlink(missing_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        for name in ("forward", "gradients") if code == 0 else ():
            found = rows[-1][name]
            both = (found["times"][n]["back_to_back"]["median"] * 1e3 for n in ("jax.jit", "jcuts"))
            print(
                case, name, "jax.jit {:.3f} ms, jcuts {:.3f} ms".format(*both), f"{found['speed-up']:.2f}x", flush=True
            )
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
