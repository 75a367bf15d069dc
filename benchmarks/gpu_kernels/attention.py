"""Attention of BERT-base (12 heads of 64) and of decoding steps (one query, split keys): schedules against XLA.

    python benchmarks/gpu_kernels/attention.py --out results --most 10 --budget 150
    python benchmarks/gpu_kernels/attention.py --out results --only decoding --most 60     # schedules of a new fit

Needs a GPU. Kernels compile in parallel first; then every size as in `run.py`. XLA is timed with its default
options and with everything in CUDA graphs; the faster one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
HEADS = 12
DEPTH = 64
SIZES = ((8, 384), (1, 384), (8, 512), (1, 512), (8, 128), (1, 128), (8, 1024), (1, 1024))
"""(batch, length), the most wanted first."""
CACHE = 2048
"""Keys of a decoding step's cache."""
DECODING = ((1, 16, 16, 128), (8, 16, 16, 128), (1, 32, 8, 64), (8, 32, 8, 64))
"""(batch, heads, heads of keys and values, depth) of a decoding step, as of `decoder_model.py`."""


def attention(q: Any, k: Any, v: Any) -> Any:
    """What `workloads.bert` computes between its projections."""
    import jax
    import jax.numpy as jnp

    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * DEPTH**-0.5, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], HEADS * DEPTH)


def cases() -> list[Any]:
    """All sizes in float32, then in bfloat16; one with a mask; then decoding steps in bfloat16."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu_kernels.cases import Case
    from benchmarks.gpu_kernels.decoder_model import masked_attention

    found = []
    for kind in ("float32", "bfloat16"):
        for batch, length in SIZES:
            shapes = (((batch, length, HEADS, DEPTH), kind),) * 3
            found.append(Case(f"{kind} batch {batch} length {length}", attention, shapes))

    def masked(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * DEPTH**-0.5 + bias[:, None, None, :]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)

    shapes = (((8, 384, HEADS, DEPTH), "float32"),) * 3
    found.append(Case("float32 batch 8 length 384 bias", masked, (*shapes, ((8, 384), "float32"))))

    for batch, heads, shared, depth in DECODING:
        kept = ((batch, CACHE, shared, depth), "bfloat16")
        shapes = (((batch, 1, heads, depth), "bfloat16"), kept, kept, ((CACHE,), "bool"))
        name = f"bfloat16 decoding batch {batch} heads {heads} of {shared} depth {depth}"
        found.append(Case(name, masked_attention, shapes))
    return found


def schedules(case: Any, most: int, tiles: dict[str, list[list[Any]]]) -> list[Any]:
    """The best schedules as ranked (of decoding steps every one of a tile's kind), or those asked for."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.base.errors import Refusal
    from jcuts.lower.patterns.attention import match
    from jcuts.schedule.gpu.attention import schedules as attention_schedules
    from jcuts.schedule.gpu.attention.tile import SIXTEEN, FlashTile
    from jcuts.schedule.gpu.machine import GpuMachine

    program = program_of(case)[0]
    known = None if program is None else match(program)
    if program is None or known is None or isinstance(known, Refusal):
        print(f"{case.name}: {known}")
        return []
    machine = GpuMachine.named("H200")
    asked = tiles.get(case.name)
    if asked is None and case.name.startswith("bfloat16 decoding"):
        tiles_of_one = (s for s in attention_schedules.shapes(known, machine) if s.rows == SIXTEEN)
        ranked = sorted(tiles_of_one, key=lambda shape: attention_schedules.cycles(shape, program, machine))
        return [attention_schedules.apply_tile(program, shape) for shape in ranked[:most]]
    if asked is None:
        return [p for p, _ in attention_schedules.products(program, machine, most)]
    found = []
    for rows, keys, along, parts, stages, *rounded in asked:
        shape = FlashTile(known, rows, keys, (along, parts), stages, bool(rounded))
        found.append(attention_schedules.apply_tile(program, shape))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.wgmma_tiles import build, race

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_attention"))
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels (a folder of --out)")
    parser.add_argument("--only", default="", help="only sizes whose name contains one of these, separated by commas")
    parser.add_argument("--most", type=int, default=8, help="schedules per size")
    parser.add_argument(
        "--tiles",
        type=Path,
        help="JSON: name of a size -> [rows, keys, warps along rows, warps along "
        "keys, stages, 1 if rounded] of every schedule wanted",
    )
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.kernels or options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    wanted = [case for case in cases() if run.wanted(case, options.only)]
    tiles = json.loads(options.tiles.read_text()) if options.tiles else {}
    work = [(c, schedules(c, options.most, tiles)) for c in wanted if not tiles or c.name in tiles]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "gpu_attention.json", options.budget, start, graphs=not tiles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
