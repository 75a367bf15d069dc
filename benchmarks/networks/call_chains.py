"""Chains of kernels against single calls in whole networks on one GPU: what the race says, and what a call takes.

    python benchmarks/networks/call_chains.py --out results MobileNetV2:1:closed=scales+rounds+dots
    python benchmarks/networks/call_chains.py --out dry --dry MobileNetV2:1:closed=scales+dots  # on this CPU, for typos

After a network's name the forms that compete, separated by commas; none for all that are worth it.  Every network runs
in a process of its own and then in a second one, which finds the decision.  `step` waits for every call, `stream` only
for the last of 20; `race` and `warm` are seconds of the comparison in the first call, and of a first call that knows.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import interleaved_timing, on_gpu  # noqa: E402


class Race(logging.Handler):
    """Keeps what the log says of the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: float | None = None
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one record."""
        text = record.getMessage()
        if text.startswith("chains and single calls compared in "):
            self.seconds = float(text.split()[-2])
        if any(word in text for word in ("single", "compared", "planned and tuned", "compiled in")):
            self.texts.append(text)


def optimized(spec: str, dry: bool) -> tuple[Any, Any, tuple[Any, ...], float, Race]:
    """The user's function, what jcuts makes of it, its arguments, seconds of the first call, and what the log said."""
    import jax

    import jcuts
    from jcuts.jit import variant_space
    from jcuts.tune import session

    spec, _, only = spec.partition("=")
    race = Race()
    logging.getLogger("jcuts").setLevel(logging.INFO)
    logging.getLogger("jcuts").addHandler(race)
    platform = on_gpu.pretend(dry)
    if dry:
        from jcuts.xla.chains import fuse as chains_fuse

        chains_fuse.joined = lambda closed: 1 << 20  # as if they could matter; pyright: ignore
    session.set_progress(on_gpu.Stages())
    if only:
        chosen = [variant_space.form_of(f"jcuts/{name}") for name in only.split(",")]
        variant_space.candidate_variants = lambda closed, platform: chosen
    fn, args = on_gpu.workload(spec, dry)
    jax.block_until_ready(args)
    ours = jcuts.optimize(on_gpu.named(fn, "ours"))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    on_gpu.note(f"{spec} on {platform}: first call {time.perf_counter() - start:.1f} s")
    return fn, ours, args, time.perf_counter() - start, race


def measure(spec: str, dry: bool, seconds: float) -> dict[str, Any]:
    """One network: the decision, and the times of its programs."""
    import jax
    import numpy as np

    from jcuts.base.settings import Variant
    from jcuts.jit import variant_space

    _, ours, args, first, race = optimized(spec, dry)
    decision = ours.decision(*args)
    competing = ours.programs(*args)
    names = []
    for name in competing:
        form = None if variant_space.is_xla(name) else variant_space.form_of(name)
        if form is not None and not form.chained:
            names += [variant_space.name_of(Variant.tuned(form), name.partition(":")[2]), name]
    calls = {name: functools.partial(call, *args) for name, call in competing.items() if name in names}
    results = {name: [np.asarray(x) for x in jax.tree.leaves(call())] for name, call in calls.items()}
    kept = list(results.values())
    unequal = [sum(int((a != b).sum()) for a, b in zip(one, kept[0], strict=True)) for one in kept[1:]]
    return {
        "network": spec,
        "device": str(jax.devices()[0].device_kind),
        "first_call_seconds": first,
        "race_seconds": race.seconds,
        "log": race.texts,
        "decision": decision.to_dict(),
        "notes": list(ours.explain(*args).notes),
        "unequal": unequal,
        "times": interleaved_timing.timed(calls, seconds) if calls else {},
    }


def warm(spec: str, dry: bool) -> dict[str, Any]:
    """A process that finds the decision."""
    from jcuts.jit import chain_ablation

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a decision that is kept was timed again")

    chain_ablation.ablate_chains = refuse
    _, ours, args, first, race = optimized(spec, dry)
    return {"warm_seconds": first, "warm_chosen": ours.decision(*args).chosen, "warm_log": race.texts}


def line(row: dict[str, Any]) -> str:
    """One network as text."""
    if "failed" in row:
        return f"{row.get('network')}: {row['failed']}"
    times = "; ".join(
        f"{name} stream {t['stream'][0] * 1e3:.4f} step {t['step'][0] * 1e3:.4f} ms"
        for name, t in row.get("times", {}).items()
    )
    return (
        f"{row['network']}: {row['decision']['chosen']}: {row['decision']['reason']}\n    {times}\n    first call "
        f"{row['first_call_seconds']:.1f} s, race {row['race_seconds']} s, unequal {row['unequal']}, "
        f"warm {row.get('warm_seconds', 0.0):.1f} s {row.get('warm_chosen')}"
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, per network")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", choices=("measure", "warm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        spec = options.networks[0]
        print(
            json.dumps(
                warm(spec, options.dry) if options.child == "warm" else measure(spec, options.dry, options.seconds)
            ),
            flush=True,
        )
        return
    options.gpus = 1
    start = time.perf_counter()
    for spec in options.networks:
        row: dict[str, Any] = {"network": spec}
        for what in ("measure", "warm"):
            left = options.budget - (time.perf_counter() - start)
            if left <= 5 or "failed" in row:
                row.setdefault("failed", f"{what}: no time is left")
                break
            row |= on_gpu.child(what, spec, options, left, script=__file__)
            name = on_gpu.label(spec.partition("=")[0])
            (options.out / f"chains_{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        print(line(row), flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
