"""Accuracy of gradients against float64: those of a training step by `jax.jit` and by `jcuts.optimize`, leaf by leaf.

    python benchmarks/training_equivalence/gradients.py --out DIR [--network NAME ...] [--batches 7] [--mode mixed]

A gradient is the optimiser's first moment after one step from zero moments: SGD's momentum is the gradient itself,
Adam's a fixed share of the clipped one.  (The change of the parameters would be rounded to the parameters' own digits.)
The step runs once on each of ``--batches`` batches, always from the same parameters.  A leaf's error is that of its
median batch: the L2 norm of its difference from float64 over the L2 norm of the float64 gradient, and the largest
difference over its root mean square.  Not of the worst batch, for where rounding moves the argument of one ReLU across
zero, the gradients of all layers before it differ by the share of that one activation, in any program in float32; such
batches are counted.  Leaves whose exact gradient is zero (a bias before a batch norm) are listed apart, with errors
over the norm of all gradients.

The reference has the arguments of the float32 step and is the same step built in float64 (``jax.enable_x64``); for
networks of keras, which has no float64 on JAX, it is the float32 step's jaxpr with every number widened.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.compiled_program import own_arguments  # noqa: E402
from benchmarks.training_equivalence import network_processes, training_networks  # noqa: E402
from benchmarks.training_equivalence.training_networks import Network, Training  # noqa: E402

PROGRAMS = ("jax.jit", "jcuts")
WORSE = 2.0
"""Ratio of errors from which on a leaf is named."""
NAMED = 8
"""Most leaves that are printed; the file has all of them."""
FLIPPED = 1e-4
"""Relative L2 error that rounding of smooth functions does not make: some ReLU took the other side."""
VANISHING = 1e-10
"""Of the norm of all gradients: a leaf below it is zero in exact arithmetic."""


def first_moment(state: Any) -> Any:
    """Gradients in an optimiser's state after one step from zero: Adam's ``m``, or the momentum of SGD."""
    return state["m"] if isinstance(state, dict) and "m" in state else state


def gradients(call: Callable[..., Any], form: Any, batches: Sequence[tuple[Any, ...]]) -> tuple[Any, list[float]]:
    """First moments per batch (leaves of float64), and losses, each from the form's own parameters."""
    import jax
    import numpy as np

    found, losses = [], []
    for batch in batches:
        result = Training(call, form, own_arguments(form), [batch]).step()
        state = first_moment(result[form.carried - 1])
        found.append([np.asarray(x, np.float64) for x in jax.tree.leaves(state)])
        losses.append(float(result[-1]))
    return found, losses


def widened(tree: Any) -> Any:
    """The same numbers as float64; integers as they are."""
    import jax
    import numpy as np

    def wide(x: Any) -> Any:
        return jax.numpy.asarray(np.asarray(x), np.float64 if jax.numpy.issubdtype(x.dtype, np.floating) else x.dtype)

    return jax.tree.map(wide, tree)


def float64_form(network: Network, form: Any, dry: bool) -> tuple[Any, str]:
    """The step in float64 with the arguments of the float32 one, and how it was made. Under ``jax.enable_x64``.

    Raises: TypeError: a step that was built in float64 holds float32 numbers nevertheless.
    """
    import jax

    from jcuts.tune.verify import float64_eval

    arguments = widened(form.arguments)
    if network.wide:
        function, how = network.form("float64", dry=dry).function, "built in float64"
        if "f32[" in str(jax.make_jaxpr(function)(*arguments)):
            raise TypeError(f"{network.name} computes in float32 where float64 is asked for")
    else:
        with jax.enable_x64(False):
            closed, shape = jax.make_jaxpr(form.function, return_shape=True)(*form.arguments)
        tree, how = jax.tree.structure(shape), "float32 program with every number widened"

        def function(*arguments: Any) -> Any:
            return jax.tree.unflatten(tree, float64_eval.evaluate(closed, jax.tree.leaves(arguments)))

    return type(form)(function, arguments, form.first, form.carried), how


def exact(
    network: Network, form: Any, batches: Sequence[tuple[Any, ...]], options: argparse.Namespace
) -> tuple[Any, list[float], str]:
    """Gradients and losses in float64, from the float32 step's parameters and data, and how they were computed."""
    import jax

    device = jax.devices("cpu")[0] if options.reference == "cpu" else jax.devices()[0]
    with jax.enable_x64(True), jax.default_device(device):
        wide, how = float64_form(network, form, options.dry)
        call = jax.jit(wide.function, donate_argnums=wide.donated)
        return *gradients(call, wide, [widened(b) for b in batches]), f"{how}, {device.platform}"


def errors(found: Sequence[Sequence[Any]], wanted: Sequence[Sequence[Any]], leaf: int) -> dict[str, float]:
    """Errors of a leaf in the median batch (L2, relative; largest, over the root mean square), and in the worst one."""
    import numpy as np

    l2, largest, absolute = [], [], []
    for one, other in zip(found, wanted, strict=True):
        off, size = one[leaf] - other[leaf], float(np.linalg.norm(other[leaf])) or 1.0
        absolute.append(float(np.linalg.norm(off)))
        l2.append(absolute[-1] / size)
        largest.append(float(np.abs(off).max(initial=0.0)) / (size / off.size**0.5))
    middle = [float(np.median(x)) for x in (l2, largest, absolute)]
    return dict(zip(("l2", "max", "absolute"), middle, strict=True)) | {"worst batch": max(l2)}


def flips(results: tuple[Any, list[float]], wanted: Sequence[Sequence[Any]]) -> int:
    """Batches in which some leaf, of those that are not zero, is off by more than `FLIPPED` in L2."""
    import numpy as np

    def flipped(one: Sequence[Any], other: Sequence[Any]) -> bool:
        sizes = [float(np.linalg.norm(x)) for x in other]
        kept = [(a, b, s) for a, b, s in zip(one, other, sizes, strict=True) if s > VANISHING * np.linalg.norm(sizes)]
        return any(np.linalg.norm(a - b) > FLIPPED * s for a, b, s in kept)

    return sum(flipped(*pair) for pair in zip(results[0], wanted, strict=True))


def summary(leaves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Worst and median leaf of each program, ratios of errors jcuts / jax.jit, and the leaves that are worse."""
    import numpy as np

    made: dict[str, Any] = {}
    for kind in ("l2", "max", "worst batch"):
        columns = [np.array([leaf[name][kind] for leaf in leaves]) for name in PROGRAMS]
        ratios = columns[1] / np.maximum(columns[0], np.finfo(np.float64).tiny)
        made[kind] = {
            **{
                name: {
                    "worst": float(c.max()),
                    "median": float(np.median(c)),
                    "worst leaf": leaves[int(c.argmax())]["leaf"],
                }
                for name, c in zip(PROGRAMS, columns, strict=True)
            },
            "ratio": {
                "of worst": float(columns[1].max() / columns[0].max()),
                "of medians": float(np.median(columns[1]) / np.median(columns[0])),
                "median": float(np.median(ratios)),
                "largest": float(ratios.max()),
            },
            "worse": [
                [leaf["leaf"], leaf["shape"], round(float(r), 2)]
                for leaf, r in zip(leaves, ratios, strict=True)
                if r > WORSE
            ],
            "better": int((ratios < 1 / WORSE).sum()),
        }
    return made


def rows_of(
    form: Any, results: dict[str, tuple[Any, list[float]]], wanted: Sequence[Sequence[Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Errors of the leaves, and of those that are zero in exact arithmetic."""
    import jax
    import numpy as np

    total = float(np.median([np.sqrt(sum(float((x**2).sum()) for x in one)) for one in wanted]))
    leaves, vanishing = [], []
    for k, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(form.arguments[form.first])[0]):
        row: dict[str, Any] = {"leaf": jax.tree_util.keystr(path), "shape": list(wanted[0][k].shape)}
        norm = float(np.median([np.linalg.norm(one[k]) for one in wanted]))
        found = {name: errors(results[name][0], wanted, k) for name in PROGRAMS}
        if norm > VANISHING * total:
            leaves.append(row | {"share": norm / total} | found)
        else:
            vanishing.append(row | {n: f["absolute"] / total for n, f in found.items()})
    return leaves, vanishing


def measure(network: Network, options: argparse.Namespace) -> dict[str, Any]:
    """One network, in this process."""
    form = network.form(dry=options.dry)
    batches = training_networks.batches(form, options.batches)
    results = {}
    said: dict[str, Any] = {}
    for name in PROGRAMS:
        call = training_networks.program(name, form, options.mode, options.tune)
        results[name] = gradients(call, form, batches)
        if name == "jcuts":
            said = training_networks.chosen(call, form.arguments)
    wanted, losses, how = exact(network, form, batches, options)
    leaves, vanishing = rows_of(form, results, wanted)
    return {
        "batches": options.batches,
        "reference": how,
        "jcuts": said,
        "losses": {"float64": losses, **{name: results[name][1] for name in PROGRAMS}},
        "batches with flips": {name: flips(results[name], wanted) for name in PROGRAMS},
        "summary": summary(leaves),
        "leaves": leaves,
        "vanishing": vanishing,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = network_processes.parser_of(__doc__)
    parser.add_argument("--batches", type=int, default=7, help="an error is that of the median batch (%(default)s)")
    parser.add_argument("--reference", choices=("device", "cpu"), default="device", help="where float64 is computed")
    found = network_processes.run(__file__, parser, measure, argv)
    for name, row in found.items():
        if "summary" not in row:
            continue
        made = row["summary"]["l2"]
        plain, ours = made["jax.jit"], made["jcuts"]
        print(
            f"{name}: {row['jcuts']['chosen']}, {row['jcuts']['kernels']} kernels; L2 errors of jax.jit, jcuts: "
            f"worst leaf {plain['worst']:.1e} {ours['worst']:.1e}, median {plain['median']:.1e} {ours['median']:.1e}; "
            f"{len(made['worse'])} of {len(row['leaves'])} leaves over {WORSE} times: {made['worse'][:NAMED]}; "
            f"batches with flips {row['batches with flips']}"
        )
    return int(any("summary" not in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
