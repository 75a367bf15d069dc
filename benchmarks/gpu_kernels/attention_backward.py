"""Backward pass of attention with recomputed weights: schedules of dQ and of dK with dV against XLA, and all together.

    python benchmarks/gpu_kernels/attention_backward.py --out results --most 10 --budget 150

Needs a GPU. Kernels compile in parallel first; then every part as in `run.py`: the forward pass with its logsumexp, dQ,
and dK with dV, each against XLA's code for the same recomputation.  `attention_backward_sums.json` compares the sum of
the best kernels with XLA's code for the gradient as autodiff writes it, which keeps the weights in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SIZES = {
    "GPT": (8, 512, 12, 64),
    "GPT causal": (8, 512, 12, 64),
    "BERT-large": (8, 384, 16, 64),
    "odd": (3, 77, 5, 40),
    "long": (1, 2048, 12, 64),
    "deep": (2, 512, 8, 128),
}
"""Batch, length, heads, depth; with a causal mask where the name says so."""
CAUSAL = "causal"
KINDS = ("float32", "bfloat16")


def scores(q: Any, k: Any, causal: bool) -> Any:
    """Scaled products of queries and keys, later keys masked where that is asked for."""
    import jax
    import jax.numpy as jnp

    made = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, "float32")) * (
        q.shape[-1] ** -0.5
    )
    if not causal:
        return made
    rows, keys = (jax.lax.broadcasted_iota("int32", made.shape, d) for d in (2, 3))
    return jnp.where(keys <= rows, made, -1e9)


def forward(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Attention and the logsumexp of its scores."""
    import jax.numpy as jnp

    made = scores(q, k, causal)
    most = made.max(-1, keepdims=True)
    powers = jnp.exp(made - most)
    total = powers.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", (powers / total).astype(v.dtype), v), most + jnp.log(total)


def queries(q: Any, k: Any, lse: Any, grad: Any, v: Any, delta: Any, causal: bool = False) -> Any:
    """dQ."""
    import jax.numpy as jnp

    return jnp.einsum("bhqk,bkhd->bqhd", _change(q, k, lse, grad, v, delta, causal)[1], k)


def keys(q: Any, k: Any, lse: Any, grad: Any, v: Any, delta: Any, causal: bool = False) -> Any:
    """dV and dK."""
    import jax.numpy as jnp

    weights, change = _change(q, k, lse, grad, v, delta, causal)
    values = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(q.dtype), grad)
    return values, jnp.einsum("bhqk,bqhd->bkhd", change, q)


def _change(q: Any, k: Any, lse: Any, grad: Any, v: Any, delta: Any, causal: bool) -> tuple[Any, Any]:
    import jax.numpy as jnp

    weights = jnp.exp(scores(q, k, causal) - lse)
    wide = jnp.promote_types(q.dtype, "float32")
    moved = jnp.einsum("bqhd,bkhd->bhqk", grad, v, preferred_element_type=wide)
    return weights, (weights * (moved - delta) * (q.shape[-1] ** -0.5)).astype(q.dtype)


def gradient(q: Any, k: Any, v: Any, grad: Any, causal: bool = False) -> Any:
    """Attention and its gradients, as autodiff writes them."""
    import jax

    out, backward = jax.vjp(lambda *xs: forward(*xs, causal)[0], q, k, v)
    return out, *backward(grad)


def cases(kinds: Sequence[str]) -> list[tuple[Any, bool]]:
    """All parts of all sizes, and whether they are kernels."""
    from benchmarks.gpu_kernels.cases import Case

    found = []
    for kind in kinds:
        for name, (batch, length, heads, depth) in SIZES.items():
            array, row = ((batch, length, heads, depth), kind), ((batch, heads, length, 1), "float32")
            both = (array, array, row, array, array, row)
            for part, fn, shapes in (
                ("gradient", gradient, (array,) * 4),
                ("forward", forward, (array,) * 3),
                ("queries", queries, both),
                ("keys", keys, both),
            ):
                masked = functools.partial(fn, causal=CAUSAL in name)
                found.append((Case(f"{kind} {name} {part}", masked, shapes), part != "gradient"))
    return found


def schedules(case: Any, most: int) -> list[Any]:
    """The best schedules as ranked."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.schedule.gpu import candidates as gpu_candidates
    from jcuts.schedule.gpu.machine import GpuMachine

    program, why = program_of(case)
    if program is None:
        print(f"{case.name}: {why}")
        return []
    return [p for p, _ in gpu_candidates.candidates(program, GpuMachine.named("H100"), most)]


def sums(out: Path) -> None:
    """Compares the sums of the best kernels with XLA's gradient."""
    rows = {row["case"]: row for row in json.loads((out / "attention_backward.json").read_text())}
    found = {}
    for name, row in rows.items():
        if name.endswith("gradient"):
            parts = [rows.get(name.replace("gradient", part)) for part in ("forward", "queries", "keys")]
            best = [p["candidates"][p["best"]]["median"] if p and "best" in p else None for p in parts]
            total = None if None in best else sum(best)  # type: ignore[arg-type]
            found[name] = {"xla": row["xla"]["median"], "parts": best, "kernels": total, "xla_error": row["xla_error"]}
            print(name, f"XLA {row['xla']['median'] * 1e6:.1f} us, kernels", total and f"{total * 1e6:.1f} us", best)
    (out / "attention_backward_sums.json").write_text(json.dumps(found, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.wgmma_tiles import build, race

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_attention_backward"))
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels (a folder of --out)")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="element types")
    parser.add_argument("--most", type=int, default=8, help="schedules per case")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.kernels or options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    wanted = [(c, is_kernel) for c, is_kernel in cases(options.kinds.split(",")) if run.wanted(c, options.only)]
    work = [(c, schedules(c, options.most) if is_kernel else []) for c, is_kernel in wanted]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "attention_backward.json", options.budget, start)
        sums(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
