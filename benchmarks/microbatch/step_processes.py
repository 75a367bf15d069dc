"""Whole training steps in processes of their own: time, peak memory, and gradients against plain jax.jit and float64.

    spec     plain: plain jax.jit; float64: plain, in float64; limit: WR [B]; total: WD with the paper's constraint [B];
             single: single calls of cuDNN only; mixed: XLA's own convolutions compete; launched: no CUDA graphs

All processes import, trace and compile at once.  Whoever is ready runs; all others stand still meanwhile, since XLA
times algorithms on the device while it compiles.  Every program is compiled once: what was compiled is kept, with the
algorithms that XLA chose.  Run by `gpu_tables.py`, which fills the database meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NO_LIMIT = 1 << 45
PROGRAMS = "programs"
"""Folder of what was compiled."""
WARM = 2
"""Steps before the first that is timed."""
TIMED = 8
"""Steps of a sample."""
TURNS = 3
"""Samples of every process."""
LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""Of all programs: products by the library.  XLA compiles hundreds of kernels to choose from otherwise, for minutes."""


class Race:
    """Programs that compile in processes of their own, and take turns.

    Args: bases: of every program ``id``, ``network``, ``batch``, ``precision``, ``dry``, and ``float64`` where it is;
    folder: for gradients, deleted by the caller; kept: where compiled programs stay.  A context manager: no process
    outlives it.
    """

    def __init__(self, bases: Sequence[dict[str, Any]], folder: Path, kept: Path) -> None:
        self.folder = folder
        self.running: dict[str, tuple[subprocess.Popen[str], queue.SimpleQueue[str]]] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self.done: set[str] = set()
        # No lock of a cache is shared with processes that stand still.
        env = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": str(ROOT),
            "CUDA_CACHE_DISABLE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(kept.resolve() / PROGRAMS),
        }
        for base in bases:
            more = {"JAX_PLATFORMS": "cpu" if base["dry"] else "cuda"}
            if base.get("float64"):
                more["JAX_ENABLE_X64"] = "1"
            with open(folder / f"{base['id']}.log", "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, __file__, json.dumps(base), str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**env, **more},
                    text=True,
                )
            lines: queue.SimpleQueue[str] = queue.SimpleQueue()
            threading.Thread(target=_forward, args=(process, lines), daemon=True).start()
            self.running[base["id"]] = (process, lines)

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _lines in self.running.values():
            process.kill()
            process.wait()

    def compile(self, specs: Sequence[dict[str, Any]]) -> None:
        """Says what some of them are: they compile."""
        for spec in specs:
            self.specs[spec["id"]] = spec
            self._say(spec["id"], json.dumps(spec))

    def run(self, end: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(spec, answer) of all that did not run yet; of those that fail or take too long ``{"error": why}``.

        Args: end: time of `time.monotonic` when waiting ends.
        """
        waiting = {name: spec for name, spec in self.specs.items() if name not in self.done}
        self.done |= set(waiting)
        while waiting:
            late = time.monotonic() >= end
            name = next((n for n in waiting if not self.running[n][1].empty()), next(iter(waiting)) if late else None)
            if name is None:
                time.sleep(0.05)
                continue
            spec, (process, lines) = waiting.pop(name), self.running[name]
            text = _next(lines, 0.0)
            if text == "ready" and not late:
                with self._alone(name):
                    self._say(name, "go")
                    text = _next(lines, end)
            answer = json.loads(text) if text.startswith("{") else {"error": self._words(name, end)}
            process.kill()
            process.wait()
            yield spec, answer

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """All other processes stand still."""
        others = [process for n, (process, _) in self.running.items() if n != name and process.poll() is None]
        try:
            for process in others:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            for process in others:
                process.send_signal(signal.SIGCONT)

    @property
    def waiting(self) -> int:
        """Programs that did not run yet."""
        return len(self.specs) - len(self.done)

    def _say(self, name: str, text: str) -> None:
        stdin = self.running[name][0].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(text + "\n")
            stdin.flush()

    def _words(self, name: str, end: float) -> str:
        if time.monotonic() >= end:
            return "the budget was spent"
        return (self.folder / f"{name}.log").read_text(errors="replace").strip()[-600:] or "no answer in time"


def _forward(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.strip())
    lines.put("")


def _next(lines: queue.SimpleQueue[str], end: float) -> str:
    try:
        return lines.get(timeout=max(0.01, end - time.monotonic()))
    except queue.Empty:
        return ""


# -- one process ----------------------------------------------------------------------------------------------------
def program(spec: dict[str, Any], closed: Any) -> tuple[Any, dict[str, Any]]:
    """The step with its convolutions as the spec says, and what was chosen."""
    from jcuts.base.settings import Settings
    from jcuts.microbatch import batch_division_dp
    from jcuts.pipeline import microbatch_convs
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline
    from jcuts.xla.cudnn.match import call_site

    if spec.get("plain") or spec.get("float64"):
        return closed, {}
    if spec.get("single"):
        microbatch_convs.desirable = lambda table, batch, limit, **more: (
            batch_division_dp.undivided(table, batch, limit, **more),
        )
    if spec.get("launched"):
        microbatch_convs.call_site = lambda *args, **more: call_site(*args, **{**more, "graph": False})
    if spec.get("total") is not None:
        microbatch_convs.CONSTRAINT = "paper"
    settings = Settings(
        mode="mixed" if spec.get("mixed") else "fusion",
        tune="cached",
        workspace_limit=spec.get("limit"),
        total_workspace=spec.get("total"),
    )
    made = microbatch_convs.divide_convolutions(
        simplify(inline(closed)), settings, "cpu" if spec["dry"] else "cuda", may_measure=False
    )
    spaces = [row.workspace for row in made.rows if row.division]
    said = {
        "note": made.note,
        "by cuDNN": made.count,
        "convolutions": len(made.rows),
        "in pieces": sum(row.division.split(" ")[0] != "1" or "+" in row.division for row in made.rows if row.division),
        "sum of workspaces": sum(spaces),
        "largest workspace": max(spaces, default=0),
        "seconds of convolutions": sum(row.seconds or 0.0 for row in made.rows),
        "left": sorted({row.why for row in made.rows if row.why}),
        "layers": [[row.layer, row.division or row.why] for row in made.rows],
    }
    return made.closed, said


def child(base: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Traces, hears what program it is, compiles, says so, waits, runs."""
    import jax
    import numpy as np

    from benchmarks.microbatch.training_models import gradients, inputs_of
    from jcuts.trace import jaxapi
    from jcuts.xla.cudnn.match import scratch_bytes

    arguments = inputs_of(base["network"], base["batch"], tiny=base["dry"])
    if base.get("float64"):
        wide = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, arguments)
        arguments = wide
    leaves, tree = jax.tree.flatten(arguments)
    step = gradients(base["network"], "highest" if base["precision"] == "float32" else "default", tiny=base["dry"])
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(step(*jax.tree.unflatten(tree, xs))))(*leaves)

    heard = sys.stdin.readline()
    if not heard.strip():
        raise SystemExit(0)
    spec = json.loads(heard)
    start = time.monotonic()
    lean = {} if spec["dry"] else {"xla_gpu_autotune_level": 0} if spec.get("float64") else LIBRARY_PRODUCTS
    device = jax.local_devices()[0]
    peaks: dict[str, Any] = {}

    def note(when: str) -> None:
        peaks[when] = (device.memory_stats() or {}).get("peak_bytes_in_use")

    def made(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        chosen, said = program(spec, closed)
        compiled = jax.jit(lambda *xs: jaxapi.eval_closed(chosen, *xs), compiler_options=lean).lower(*leaves).compile()
        analysis = compiled.memory_analysis()
        scratch = scratch_bytes(compiled.as_text() or "")
        temporary = analysis and int(analysis.temp_size_in_bytes)
        return compiled, {**said, "temporary bytes": temporary, "largest workspace of XLA's convolutions": scratch}

    compiled, said = made(spec)
    said["compile seconds"] = round(time.monotonic() - start, 1)
    note("compiled")
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        raise SystemExit(0)
    inputs = [jax.device_put(leaf) for leaf in leaves]
    try:
        result = jax.block_until_ready(compiled(*inputs))
    except Exception as error:
        if spec.get("launched") or spec.get("plain"):
            raise
        compiled, said = made({**spec, "launched": True})
        said["in graphs"] = str(error)[:400]
        result = jax.block_until_ready(compiled(*inputs))
    note("called")
    np.savez(folder / f"{spec['id']}.npz", *[_some(np.asarray(x)) for x in result])
    waited: list[float] = []
    launched: list[float] = []
    queued: list[float] = []
    count, turns = (1, 1) if spec["dry"] or spec.get("once") else (TIMED, TURNS)
    for turn in range(turns):
        for k in range(WARM + count):
            result = None
            begin = time.perf_counter()
            result = compiled(*inputs)
            sent = time.perf_counter()
            jax.block_until_ready(result)
            if k >= WARM:
                waited.append(time.perf_counter() - begin)
                launched.append(sent - begin)
        note("waited for") if not turn else None
        begin = time.perf_counter()
        for _ in range(count):
            result = None
            result = compiled(*inputs)
        jax.block_until_ready(result)
        queued.append((time.perf_counter() - begin) / count)
    note("queued")
    return {
        **said,
        "loss": float(np.load(folder / f"{spec['id']}.npz")["arr_0"]),
        "seconds": float(np.median(waited)),
        "quartiles": [float(q) for q in np.quantile(waited, (0.25, 0.75))],
        "seconds queued": float(np.median(queued)),
        "queued": queued,
        "seconds of launching": float(np.median(launched)),
        "peaks": peaks,
        "peak bytes": peaks["waited for"],
    }


def _some(array: Any) -> Any:
    """Every 16th element of large arrays: gradients of dense layers would take longer to compare than to compute."""
    return array.reshape(-1)[::16] if array.size > 1 << 18 else array


def distances(folder: Path, spec: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """Of one program's gradients from another's in L2 norm: all of them together, and the worst array."""
    import numpy as np

    files = [folder / f"{s['id']}.npz" for s in (spec, other)]
    if not all(file.exists() for file in files):
        return None
    with np.load(files[0]) as mine, np.load(files[1]) as theirs:
        apart, size, worst = 0.0, 0.0, 0.0
        for name in mine.files[1:]:
            a, b = mine[name].astype(np.float64), theirs[name].astype(np.float64)
            d, n = float(np.sum((a - b) ** 2)), float(np.sum(b**2))
            apart, size, worst = apart + d, size + n, max(worst, (d / n) ** 0.5 if n else 0.0)
    return {"all": (apart / size) ** 0.5 if size else 0.0, "worst": worst}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # Steps are read from, and answered on, the descriptors; whatever prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = answers
    print(json.dumps(child(json.loads(sys.argv[1]), Path(sys.argv[2]))), flush=True)
