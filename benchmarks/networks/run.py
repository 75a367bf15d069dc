"""The evaluation on whole networks, on one or several GPUs: speed, modes, unusual blocks, code generation.

    python benchmarks/networks/run.py --out results  # everything; what is there already is skipped
    python benchmarks/networks/run.py --out results --gpus 4 --budget 3600  # four GPUs side by side, an hour
    python benchmarks/networks/run.py --out results modes blocks  # parts of it
    python benchmarks/networks/run.py --out results speed/ResNet50:64:closed modes/MobileNetV2:1:closed
    python benchmarks/networks/run.py --out results --table --markdown  # what is there, as tables
    python benchmarks/networks/run.py --out dry --dry blocks planning/MobileNetV2:2:closed  # on this CPU: finds typos

| part | what each of its items writes (OUT/PART_NAME_bBATCH_bFORM.json) |
|---|---|
| speed | plain `jax.jit`, XLA with its best options, `torch.compile`, jcuts; errors, kernels, roofline, a warm start |
| modes | `no_fusion`, `fusion` and `mixed`: whole programs, and the time of all kernels by kind |
| blocks | Octave convolution and Shift-Conv-Shift-Conv modules, as `speed` |
| planning | what Python does before and without measuring, for a pretended H200: needs no GPU |

An item is PART/NAME:BATCH:FORM, then perhaps :bfloat16; FORM is `closed` (weights are constants) or `args`.  Every item
runs in processes of its own with a tuning database of its own, so that a first call is a cold one; both sides have
their weights in the same form.  Code generation's table is fitted to all first calls of `speed`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import on_gpu, tables  # noqa: E402
from benchmarks.networks.modes import MODES  # noqa: E402

PARTS = ("speed", "modes", "blocks", "planning")
NETWORKS = ("ResNet50", "DenseNet121", "MobileNetV2", "InceptionV3")
BLOCKS = ("octave", "shift_conv")
BATCHES = (1, 16, 64, 256)
"""Batch sizes of float32."""
HALF = (1, 64)
"""Batch sizes of bfloat16."""
LEAST = {"speed": 90.0, "modes": 90.0, "blocks": 30.0, "planning": 0.0}
"""Seconds that must be left to begin an item."""


def items(part: str, forms: Sequence[str]) -> list[str]:
    """All items of a part. Args: forms: calling forms of the networks."""
    if part == "blocks":
        return [f"{part}/{name}:{batch}:closed" for name in BLOCKS for batch in (1, 64)]
    if part != "speed":
        return [f"{part}/{name}:{batch}:closed" for batch in (1, 64) for name in NETWORKS]
    full = [f"{part}/{name}:{batch}:{form}" for form in forms for batch in BATCHES for name in NETWORKS]
    return full + [f"{part}/{name}:{b}:{form}:bfloat16" for form in forms for b in HALF for name in NETWORKS]


def asked(names: Sequence[str], forms: Sequence[str]) -> list[str]:
    """Items for what the command line names: parts, or single items.

    >>> asked(["modes"], ["closed"])[0]
    'modes/ResNet50:1:closed'
    """
    found = []
    for name in names or PARTS:
        part = name.partition("/")[0]
        if part not in PARTS:
            raise SystemExit(f"{name}: there is no part {part!r}; parts are {', '.join(PARTS)}")
        found += [name] if "/" in name else items(part, forms)
    return found


def path_of(item: str, out: Path) -> Path:
    """The file of an item."""
    part, _, spec = item.partition("/")
    return out / f"{part}_{on_gpu.label(spec)}.json"


def stages(part: str, options: argparse.Namespace) -> tuple[str, ...]:
    """What is run for an item, each in a process; in the file of the item every one has a key of its name."""
    if part in ("modes", "planning"):
        return (part,)
    torch = ("torch",) * (options.torch and part == "speed")
    return ("measure", *("warm",) * options.warm, *torch)


def run(item: str, options: argparse.Namespace, left: Callable[[], float], lane: int) -> None:
    """Runs what is missing of one item. Args: left: seconds of the budget; lane: which GPU."""
    part, _, spec = item.partition("/")
    path = path_of(item, options.out)
    for what in stages(part, options):
        row = read(path)
        main = what in ("measure", "modes", "planning")
        if row.get("finished") if main else (what in row or (what == "warm" and "times" not in row)):
            continue
        if left() < (min(LEAST[part], options.least) if main else 5.0):
            print(f"{item}: {what} is not begun, {max(0.0, left()):.0f} s are left", flush=True)
            return
        cache = f"cache/{on_gpu.label(spec)}"  # a first call is a cold one; modes of one item share it
        where = argparse.Namespace(**{**vars(options), "out": options.out})
        extra = ["--item", item, "--modes", *options.modes, "--torch-mode", options.torch_mode]
        fresh = not (options.out / cache).exists()
        found = on_gpu.child(
            what, spec, where, min(options.limit, left() + 20), lane, script=__file__, cache=cache, extra=extra
        )
        row = read(path) | ({"cold": fresh} if main else {})
        row.pop("failed", None)
        row |= {"part": part, "network": spec, **(found if main else {what: found})}
        if "failed" in found:
            row["failed"] = found["failed"]
        path.write_text(json.dumps(row, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """What is known of an item."""
    return json.loads(path.read_text()) if path.exists() else {}


def child(what: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    from benchmarks.networks import modes

    part, _, spec = options.item.partition("/")
    if what == "torch":
        from benchmarks.networks import torch_compile

        return torch_compile.measure(spec, options.seconds, options.torch_mode)
    if what == "warm":
        return modes.warm(spec, options.dry)
    if what == "planning":
        return modes.planning(spec, options.dry)
    if what == "modes":
        return modes.modes(spec, options.out, options.dry, options.seconds, options.modes)
    return on_gpu.measure(spec, options.out, options.dry, options.seconds, prefix=f"{part}_")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", help="parts, or PART/NAME:BATCH:FORM")
    parser.add_argument("--out", type=Path, default=Path("networks"))
    parser.add_argument("--arguments", action="store_true", help="also networks whose weights are arguments")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; an item is not begun after them")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--least", type=float, default=1e9, help="seconds that are enough to begin an item")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing per item")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that take the next item each")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of `modes`, in this order")
    parser.add_argument("--no-warm", dest="warm", action="store_false", help="no second process")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--torch-mode", default="reduce-overhead", help="or max-autotune")
    parser.add_argument("--dry", action="store_true", help="small networks on the CPU")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--markdown", action="store_true", help="tables for docs/benchmarks.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--item", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        print(json.dumps(child(options.child, options)))
        return 0
    options.torch = options.torch and not options.dry
    if not options.table:
        todo = asked(options.items, ("closed", "args") if options.arguments else ("closed",))
        on_gpu.over_lanes(todo, options, run)
    print(tables.report(tables.load([options.out]), options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
