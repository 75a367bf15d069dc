"""Programs that XLA:CPU computes wrongly, and networks, under `jcuts.verify`: who is wrong, and what it is bisected to.

    python benchmarks/known_issues/xla_wrong_results.py --out verify.json [--networks] [--reproducers FOLDER] [CASE ...]

| case | issue | jaxlib that has it |
|---|---|---|
| sum_of_squares | jax-ml/jax 39103: a product with a small matrix, then a sum | 0.10.2 |
| rank_8_reduce | jax-ml/jax 39257: broadcast, product and sum at rank 8 crash or hang | 0.10.2, 0.11.0 |
| rank_7_reduce | jax-ml/jax 40412: the same at rank 7 with an extent of 1 | 0.10.2 |
| window_min | `reduce_window` loses NaN | 0.10.2, 0.11.2 |
| largest | `reduce_max` loses NaN | 0.10.2, 0.11.2 |
| autotuned_sum | openxla/xla 37902: a sum that depends on autotuning (NVIDIA GPUs; right within rounding) | |

``--networks`` takes the networks of `NETWORKS` at tiny sizes in place of the issues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NETWORKS = (
    "MLP_training",
    "DLRM",
    "AttentionRNN",
    "LSTM_training",
    "DeepSpeech2",
    "FlaxCNN_training",
    "UNet_block",
    "ViT_B16",
    "BERT_large",
    "Whisper_tiny_encoder",
    "Llama_decode",
    "Swin_T",
    "MobileNetV2",
)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def cases() -> dict[str, Case]:
    """Function and example arguments of every issue, by name."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def sum_of_squares(x: Any) -> Any:
        matrix = jnp.eye(3, dtype=x.dtype)
        return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(x)

    def rank_8_reduce(observed: Any, table: Any) -> Any:
        total = jnp.sum(observed[..., None, None, None, None, None] * table, axis=2)
        return jnp.log(jnp.maximum(total, np.finfo(np.float64).eps))

    def rank_7_reduce(a: Any, b: Any) -> Any:
        return jnp.sum(a * b, axis=3)

    def window_min(x: Any) -> Any:
        return jax.lax.reduce_window(x, np.float32(np.inf), jax.lax.min, (2,), (2,), "VALID")

    return {
        "sum_of_squares": (sum_of_squares, (normal(32769, 3),)),
        "rank_8_reduce": (rank_8_reduce, (normal(2, 4, 6), normal(2, 4, 6, 3, 3, 3, 3, 3))),
        "rank_7_reduce": (rank_7_reduce, (normal(3, 1, 2, 2, 8, 8, 8), normal(3, 1, 2, 2, 8, 8, 8))),
        "window_min": (window_min, (normal(40003),)),
        "largest": (lambda x: jnp.max(x, axis=1), (normal(64, 4096),)),
        "autotuned_sum": (jnp.sum, (normal(4096, 4096),)),
    }


def network(name: str) -> Case:
    """A network of the benchmarks at its tiny size, weights as arguments."""
    from benchmarks.networks.workloads import CPU_WORKLOADS

    form = CPU_WORKLOADS[name].build(tiny=True).form(closed=False)
    return form.function, form.arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies the cases and writes their reports. Returns: 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one run")
    parser.add_argument("--reproducers", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    from rich.console import Console

    import jcuts
    from jcuts.cli.comparisons.verify import show

    known: dict[str, Callable[[], Case]]
    if given.networks:
        known = {name: (lambda name=name: network(name)) for name in NETWORKS}
    else:
        known = {name: (lambda case=case: case) for name, case in cases().items()}
    if unknown := [name for name in given.cases if name not in known]:
        parser.error(f"there is no case {unknown[0]}: {', '.join(known)}")
    found: dict[str, Any] = {}
    for name in given.cases or known:
        function, arguments = known[name]()
        target = None if given.reproducers is None else given.reproducers / f"{name}.py"
        begun = time.perf_counter()
        report = jcuts.verify(function, *arguments, seeds=given.seeds, seconds=given.seconds, write_to=target)
        found[name] = report.to_dict()
        print(f"== {name}, {time.perf_counter() - begun:.0f} s", flush=True)
        show(report, Console(width=100, highlight=False))
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
