"""The planner against measured steps of the reference GPT on the GPUs of one host.

    python benchmarks/planner/measured_plans.py measure --out FOLDER  # on the machine: cluster file, then every plan
    python benchmarks/planner/measured_plans.py compare RESULTS... --cluster NAME  # predicted against measured

``measure`` needs four GPUs.  Each plan runs in a process of its own with a time limit, and results are written after
each, so that one failure does not lose the others.

``compare`` fits nothing: its constants are the cluster file's.  It predicts every plan twice: by the planner's cost
model for a transformer of these sizes (as the reference step is: embedding and logits not divided by the tensor axis,
no dropout, 32-bit parameters cast in every micro-batch, recomputation without what the compiler drops), and by pricing
the step's own program (``jcuts.plan.cost.spmd_step``), time and memory; of a plan that was measured twice the median
counts, and plans that ran out of memory must be predicted to.  It needs as many devices as the plans had, of any kind:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 \
        python benchmarks/planner/measured_plans.py compare RESULTS...
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SIZES = {"layers": 24, "hidden": 2560, "heads": 20, "sequence": 1024, "vocabulary": 32768, "dtype": "bfloat16"}
BATCH = 32
PLANS = (  # data, tensor, pipeline, samples per micro-batch
    (4, 1, 1, 8),
    (2, 2, 1, 8),
    (1, 4, 1, 8),
    (2, 1, 2, 4),
    (1, 2, 2, 4),
    (1, 1, 4, 4),
    (4, 1, 1, 2),
    (1, 1, 4, 2),
    (2, 1, 2, 2),
    (1, 4, 1, 32),
    (2, 2, 1, 2),
    (2, 2, 1, 16),
    (4, 1, 1, 4),
    (2, 2, 1, 4),
)
KEPT = (
    (4, 1, 1, 8),
    (4, 1, 1, 2),
    (2, 2, 1, 8),
    (2, 1, 2, 4),
    (2, 2, 1, 16),
    (1, 4, 1, 32),
    (1, 2, 2, 4),
    (1, 1, 4, 2),
    (1, 4, 1, 8),
    (4, 1, 1, 4),
)
"""Plans that are measured without recomputation too."""


def layout(data: int, tensor: int, pipeline: int, micro: int, *, remat: bool = True) -> dict[str, Any]:
    """Arguments of the reference step's ``Config``: GPipe."""
    axes = {"data": data, "tensor": tensor, "pipeline": pipeline, "micro": micro}
    return SIZES | axes | {"count": BATCH // (data * micro), "schedule": "gpipe", "remat": remat}


def one(values: dict[str, Any], steps: int, warm: int) -> dict[str, Any]:
    """Runs a plan in this process: seconds of each step after ``warm`` of them, and what was compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.planner import gpt_step

    begun = time.perf_counter()
    config = gpt_step.Config(**values)
    mesh = gpt_step.make_mesh(config)

    def placed(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(placed, gpt_step.specs(), is_leaf=lambda s: isinstance(s, PartitionSpec))
    params = jax.jit(lambda: gpt_step.init(config), out_shardings=shardings)()
    zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, params), out_shardings=shardings)
    moments = (zeros(), zeros())
    shape = (config.batch, config.sequence + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocabulary)
    tokens = jax.device_put(tokens, placed(PartitionSpec("data")))
    ready = time.perf_counter()
    compiled = gpt_step.train_step(config, mesh).lower(params, moments, tokens).compile()
    built = time.perf_counter()
    made: dict[str, Any] = {"config": values, "setup_s": ready - begun, "compile_s": built - ready}
    made["parameters"] = sum(x.size for x in jax.tree.leaves(params))
    try:
        memory = compiled.memory_analysis()
        made["memory"] = {
            name: int(getattr(memory, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")
        }
        text = compiled.as_text() or ""
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
        made["collectives"] = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    except Exception:  # what is only reported must not stop the measurement
        made["memory_error"] = traceback.format_exc()
    seconds, losses = [], []
    for _ in range(warm + steps):
        start = time.perf_counter()
        loss, params, moments = compiled(params, moments, tokens)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - start)
    made |= {"seconds": seconds[warm:], "median_s": float(np.median(seconds[warm:])), "losses": losses}
    return made


def cluster(out: Path, name: str) -> None:
    """Measures the machine in this process and writes ``out``/NAME.toml."""
    from jcuts.plan.calibrate import fit, measure

    begun = time.perf_counter()

    def told(what: str, done: int, total: int) -> None:
        print(f"cluster: {what} ({done} of {total}), {time.perf_counter() - begun:.0f} s", flush=True)

    found = measure.measure(out, progress=told)
    (out / f"{name}.toml").write_text(fit.to_toml(found, name), encoding="utf-8")


def versions() -> dict[str, Any]:
    """What the measurement ran on."""
    import jax

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "gpus": len(devices),
        "gpu": devices[0].device_kind,
        "date": time.strftime("%Y-%m-%d"),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("XLA_", "NCCL_"))},
    }


def child(arguments: list[str], log: Path, limit: float) -> tuple[int, str]:
    """Runs this script again; its standard output, and everything into ``log``."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit, 5))
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code = -1
        output, errors = (x.decode() if isinstance(x, bytes) else x or "" for x in (late.stdout, late.stderr))
    with log.open("a", encoding="utf-8") as file:
        file.write(f"=== {arguments} -> {code}\n{output[-4000:]}\n{errors[-6000:]}\n")
    return code, output


def run_all(out: Path, name: str, limit: float) -> None:
    """Cluster file, then plans until ``limit`` seconds have passed; ``out``/plans.json grows after each."""
    begun = time.perf_counter()
    log, rows = out / "log", []
    document: dict[str, Any] = {"batch": BATCH, "sizes": SIZES, "plans": rows}
    code, text = child(["versions"], log, 90)
    document["versions"] = json.loads(text.splitlines()[-1]) if code == 0 and text else {}
    print("versions", code, document["versions"], flush=True)
    code, text = child(["cluster", "--out", str(out), "--name", name], log, 200)
    print("cluster", code, text[-300:], f"{time.perf_counter() - begun:.0f} s", flush=True)
    for plan, remat in [(plan, True) for plan in PLANS] + [(plan, False) for plan in KEPT]:
        left = limit - (time.perf_counter() - begun)
        if left < 25:
            print("no time left for", plan, flush=True)
            break
        started = time.perf_counter()
        code, text = child(["one", json.dumps(layout(*plan, remat=remat))], log, min(90, left))
        row: dict[str, Any] = {"plan": plan, "wall_s": time.perf_counter() - started}
        try:
            row |= json.loads(text.splitlines()[-1]) if code == 0 else {"failed": code}
        except (ValueError, IndexError):
            row["failed"] = "no result"
        rows.append(row)
        (out / "plans.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(
            plan,
            "" if remat else "no recomputation",
            row.get("median_s", "failed"),
            f"{row['wall_s']:.0f} s",
            flush=True,
        )


def described(sizes: dict[str, Any], batch: int) -> tuple[Any, Any]:
    """(model, work): the reference step in the planner's words."""
    from jcuts.plan.spec.model import Transformer
    from jcuts.plan.spec.workload import SOFTWARE, Training

    values = {key: sizes[key] for key in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    network = Transformer("reference step", **values, batch=batch, dropout=False, vocabulary_divided=False)
    return network.build(), Training(batch, **SOFTWARE["jax"])  # type: ignore[arg-type]


def priced(config: dict[str, Any], cluster: Any) -> tuple[float, float]:
    """(seconds, bytes per GPU) of the step's own program."""
    from benchmarks.planner import gpt_step, layout_memory
    from jcuts.plan.cost.spmd_step import step_time

    step, state = layout_memory.traced(gpt_step.Config(**config))
    return step_time(step, *state, cluster=cluster).seconds, layout_memory.predicted(step, state)


def gathered(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured plans of several results files, each once: the median of its medians; plans out of memory have none."""
    import numpy as np

    found: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        if (document["sizes"], document["batch"]) != (documents[0]["sizes"], documents[0]["batch"]):
            sys.exit("compare: the results are of different steps")
        for row in document["plans"]:
            if "median_s" in row or "memory" in str(row.get("failed")):
                config = {"remat": True} | row["config"]
                found.setdefault(json.dumps(config, sort_keys=True), []).append(row | {"config": config})
    made = []
    for rows in found.values():
        times = [row["median_s"] for row in rows if "median_s" in row]
        made.append(rows[0] | {"median_s": float(np.median(times)) if times else None})
    return made


def compare(results: list[Path], name: str) -> dict[str, Any]:
    """Measured and predicted seconds and memory of every plan, with errors, rank correlation and the plan that we would
    choose among those predicted to fit (its regret is infinite if it did not)."""
    import numpy as np

    from jcuts.plan.calibrate.validate import rank_correlation
    from jcuts.plan.search.plan import Plan
    from jcuts.plan.search.ranked import cost_plans
    from jcuts.plan.spec import cluster as clusters

    documents = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    place = clusters.load(name)
    model, work = described(documents[0]["sizes"], documents[0]["batch"])
    rows = []
    for row in gathered(documents):
        data, tensor, pipeline, micro = row["plan"]
        recompute = "full" if row["config"]["remat"] else "none"
        plan = Plan(data, tensor, pipeline, micro=micro, schedule="gpipe", recompute=recompute)
        cost = cost_plans(model, place.resized(plan.gpus), [plan], work)[0]
        parts = {part: seconds for part, seconds in cost.parts.items() if seconds}
        seconds, peak = priced(row["config"], place)
        said = row.get("memory")
        made = {"plan": row["plan"], "recompute": recompute, "measured_s": row["median_s"], "model_s": cost.seconds}
        made |= {"parts": parts, "program_s": seconds, "model_bytes": cost.memory["gpu"], "program_bytes": peak}
        if said:
            made["measured_bytes"] = said["argument"] + said["output"] - said["alias"] + said["temp"]
        rows.append(made)
    ran = [row for row in rows if row["measured_s"] is not None]
    measured = np.array([row["measured_s"] for row in ran])
    scores = {}
    for way in ("model", "program"):
        ours = np.array([row[f"{way}_s"] for row in ran])
        off = ours / measured - 1
        fits = [row for row in rows if row[f"{way}_bytes"] <= place.gpu.memory]
        best = min(fits, key=lambda row: row[f"{way}_s"])
        scores[way] = {
            "mape": float(np.abs(off).mean()),
            "max": float(np.abs(off).max()),
            "bias": float(off.mean()),
            "spearman": rank_correlation(ours, measured),
            "chosen": named(best),
            "regret": float((best["measured_s"] or np.inf) / measured.min()),
            "out_of_memory": [named(row) for row in rows if row[f"{way}_bytes"] > place.gpu.memory],
        }
    failed = [named(row) for row in rows if row["measured_s"] is None]
    names = [path.name for path in results]
    return {"cluster": name, "results": names, "plans": rows, "out_of_memory": failed, "scores": scores}


def named(row: dict[str, Any]) -> str:
    """A plan in a few characters."""
    return ", ".join(map(str, row["plan"])) + ("" if row["recompute"] == "full" else ", kept")


def show(found: dict[str, Any]) -> None:
    """The comparison as a table in Markdown."""
    print("| d, t, p, b | measured [s] | cost model | | own program | | GB | cost model | own program |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found["plans"]:
        took, held = row["measured_s"], row.get("measured_bytes")
        cells = [named(row), f"{took:.4f}" if took else "out of memory"]
        for way in ("model", "program"):
            cells += [f"{row[f'{way}_s']:.4f}", f"{row[f'{way}_s'] / took - 1:+.1%}" if took else ""]
        cells.append(f"{held / 1e9:.1f}" if held else "")
        cells += [f"{row[f'{way}_bytes'] / 1e9:.1f}" for way in ("model", "program")]
        print("| " + " | ".join(cells) + " |")
    for way, score in found["scores"].items():
        print(
            f"{way}: MAPE {score['mape']:.1%}, max {score['max']:.1%}, bias {score['bias']:+.1%}, "
            f"Spearman {score['spearman']:.3f}, chooses {score['chosen']}, {score['regret']:.3f} of the best, "
            f"does not fit: {'; '.join(score['out_of_memory']) or 'none'}"
        )
    print(f"out of memory when measured: {'; '.join(found['out_of_memory']) or 'none'}")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "compare", "one", "cluster", "versions"))
    parser.add_argument("value", nargs="*", help="one: a layout as JSON; compare: results files")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--name", default="measured")
    parser.add_argument("--cluster", default="h200-x4-measured")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--limit", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="compare: write measured and predicted here")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        run_all(arguments.out, arguments.name, arguments.limit)
    elif arguments.action == "one":
        values = json.loads(arguments.value[0])
        try:
            made = one(values, arguments.steps, arguments.warm)
        except Exception as error:  # XLA's error has no class of its own
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            made = {"config": values, "failed": f"out of memory: {str(error).splitlines()[0]}"}
        print(json.dumps(made))
    elif arguments.action == "cluster":
        cluster(arguments.out, arguments.name)
    elif arguments.action == "versions":
        print(json.dumps(versions()))
    else:
        if not arguments.value:
            parser.error("compare: which results? (JSON files that measure has written)")
        found = compare([Path(value) for value in arguments.value], arguments.cluster)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show(found)


if __name__ == "__main__":
    main()
