"""The workloads in PyTorch under `torch.compile` (inductor): channels last, TF32 on, random weights.

    python benchmarks/networks/torch_compile.py --out DIR ResNet50:64:args Llama_decode:1:args:bfloat16
    python benchmarks/networks/torch_compile.py --out DIR --seconds-total 540 --modes max-autotune

One process and one file ``torch_<workload>_<batch>_<dtype>.json`` per row; a row has a time for every mode, and another
run adds what is missing.  PyTorch has one calling form: `NAME:BATCH:closed` and `NAME:BATCH:args` are one row.  TF32 is
on for products and convolutions, as JAX's default precision on Hopper; bfloat16 inference has bfloat16 weights,
training is `torch.autocast` over float32 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import interleaved_timing  # noqa: E402
from benchmarks.networks.row_driver import Driver, read, script, write  # noqa: E402
from benchmarks.networks.workload_row import Row, all_rows  # noqa: E402

MODES = ("reduce-overhead", "default", "max-autotune", "whole-graph")
"""Modes of `torch.compile`, of which the first and the third replay CUDA graphs; the last is ``default`` with the whole
call captured into one CUDA graph (inference), also what is not compiled."""
PARTLY_COMPILED = ("DeepSpeech2", "AttentionRNN")
"""Workloads whose recurrent layers are cuDNN's, outside what is compiled: a whole graph instead of several."""
NEED = {"reduce-overhead": 60.0, "default": 50.0, "max-autotune": 240.0, "whole-graph": 60.0}
"""Seconds that a row is taken to need where nothing is known of its workload."""
NO_COUNTERPART = "no counterpart in PyTorch"


# -- in the process of a row ----------------------------------------------------------------------------------------
def compile_in_threads() -> None:
    """Has inductor compile the choices of its autotuner in threads of this process, all side by side.

    Kernels from its worker processes are compiled again, one by one, when they are timed (torch 2.11: 15 s for 20
    choices of a product, 60 to 80 s of a convolution).  What it chooses from is the same.
    """
    from torch._inductor.async_compile import AsyncCompile  # pyright: ignore[reportMissingImports]
    from torch._inductor.select_algorithm import AlgorithmSelectorCache  # pyright: ignore[reportMissingImports]

    make, ready = AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.__dict__["use_process_pool"]

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        AsyncCompile.use_process_pool = classmethod(lambda cls: False)
        try:
            return make(*args, **kwargs)
        finally:
            AsyncCompile.use_process_pool = ready

    AlgorithmSelectorCache.make_precompile_fn = in_threads


def precision() -> str:
    """Sets the precision that JAX has by default on Hopper: TF32 for float32 products and convolutions."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return "TF32 products and convolutions in float32, cudnn.benchmark"


def prepared(row: Row, compile: Callable[[Any], Any], dry: bool) -> Callable[[], Any]:
    """One call of a row's compiled program: inference without gradients, or a whole training step."""
    import torch  # pyright: ignore[reportMissingImports]

    from benchmarks.networks.torch_models import BUILDERS

    device, half = "cpu" if dry else "cuda", row.dtype == "bfloat16"
    made = BUILDERS[row.name](min(row.batch, 2) if dry else row.batch, tiny=dry)
    module = made.module.to(device)
    layout: dict[str, Any] = {"memory_format": torch.channels_last} if made.images else {}
    module = module.to(**layout) if layout else module
    training = made.optimizer is not None
    inputs = []
    for x in made.inputs:
        x = x.to(device, **(layout if x.dim() == 4 else {}))
        inputs.append(x.bfloat16() if half and not training and x.is_floating_point() else x)
    if half and not training:
        module = module.bfloat16()
    if made.eager:
        module.step = compile(module.step)
        run = module
    else:
        run = compile(module)
    if not training:
        module.eval()

        def infer() -> Any:
            with torch.no_grad():
                return run(*inputs)

        return infer
    module.train()
    optimizer = made.optimizer(module.parameters())

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext():
            loss = run(*inputs)
        loss.backward()
        if made.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), made.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def compiled(row: Row, mode: str, dry: bool = False) -> tuple[Callable[[], Any], Callable[[Any], None], dict[str, Any]]:
    """(one call, how a call is waited for, versions and seconds of compiling)."""
    import torch  # pyright: ignore[reportMissingImports]

    found: dict[str, Any] = {"torch": torch.__version__, "mode": mode, "precision": precision()}
    torch.manual_seed(0)
    torch._dynamo.reset()
    if mode.startswith("max-autotune") and not dry:
        compile_in_threads()
    whole = mode == "whole-graph"
    how: dict[str, Any] = {"backend": "eager"} if dry else {"mode": "default" if whole else mode}
    start = time.perf_counter()
    call = prepared(row, lambda f: torch.compile(f, **how), dry)

    def wait(_: Any) -> None:
        if not dry:
            torch.cuda.synchronize()

    for _ in range(4):
        call()
    wait(None)
    if whole and not dry:
        call = captured(call)
    return call, wait, found | {"compile_seconds": time.perf_counter() - start}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replays of a CUDA graph of a whole call, whose inputs stay where they are."""
    import torch  # pyright: ignore[reportMissingImports]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def row_of(spec: str) -> Row:
    """A row from ``NAME:BATCH[:FORM][:DTYPE]``.

    >>> str(row_of("bert:8:bfloat16"))
    'bert:8:args:bfloat16'
    """
    name, batch, *rest = spec.split(":")
    dtype = [part for part in rest if part not in ("closed", "args")]
    return Row.parse(":".join((name, batch, "args", *dtype)))


def measure(spec: str, seconds: float, mode: str = "reduce-overhead") -> dict[str, Any]:
    """Seconds per call of one network (median and quartiles), waited for one by one and back to back."""
    call, wait, found = compiled(row_of(spec), mode)
    return {**found, **interleaved_timing.timed({"torch": call}, seconds, wait)["torch"]}


def measure_mode(row: Row, mode: str, seconds: float, dry: bool) -> dict[str, Any]:
    """Times of a row in one mode, or why there are none."""
    import torch  # pyright: ignore[reportMissingImports]

    try:
        call, wait, found = compiled(row, mode, dry)
        times = interleaved_timing.interleaved({"torch": call}, seconds, 3 if dry else interleaved_timing.TURNS, wait)
    except Exception as error:  # whatever the compiler or the device says is the result
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    peak = {} if dry else {"peak_bytes": torch.cuda.max_memory_allocated()}
    return {**found, **times["torch"], **peak}


def in_child(row: Row, options: argparse.Namespace) -> None:
    """What a child process does: the modes that the row's file lacks, written one by one."""
    target = options.out / file_of(row)
    data = {"record": "torch", "row": str(row), "workload": row.name, "batch": row.batch, "dtype": row.dtype}
    data |= {"modes": {}, "dry": options.dry} | read(target)
    for old in ("failed", "skipped"):
        data.pop(old, None)
    try:
        import torch  # pyright: ignore[reportMissingImports]

        from benchmarks.networks.torch_models import BUILDERS
    except ModuleNotFoundError as missing:
        write(target, data | {"skipped": f"needs {missing.name}"})
        return
    if row.name not in BUILDERS:
        write(target, data | {"skipped": NO_COUNTERPART})
        return
    data["device"] = "cpu" if options.dry else torch.cuda.get_device_name()
    data["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for mode in options.modes:
        if mode not in data["modes"]:
            data["modes"][mode] = measure_mode(row, mode, options.seconds, options.dry)
            write(target, data)


# -- driver ---------------------------------------------------------------------------------------------------------
def file_of(row: Row) -> str:
    """The file of a row, whatever its calling form."""
    return f"torch_{row.name}_{row.batch}_{row.dtype}.json"


def modes_of(row: Row, modes: Sequence[str]) -> list[str]:
    """Modes of a row: where a part is not compiled, the whole call's graph instead of ``reduce-overhead``."""
    if row.name not in PARTLY_COMPILED:
        return list(modes)
    return ["whole-graph" if mode == "reduce-overhead" else mode for mode in modes]


def drive(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """One child process per row and mode that is missing; gives the number of rows that failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(options.out, options.seconds_total, options.budget)
    for row in {file_of(r): r for r in rows}.values():
        target = options.out / file_of(row)
        for mode in modes_of(row, options.modes):
            record = read(target)
            known = record.get("skipped") == NO_COUNTERPART or mode in record.get("modes", {})
            if driver.left() <= 0 or known:
                continue
            words = ["--dry"] if options.dry else []
            words += ["--child", "--modes", mode, "--seconds", options.seconds, "--out", options.out, row]
            need = 1.0 if options.dry else options.need or NEED[mode]
            outcome = driver.run_row(target, script("torch_compile.py", *words), need)
            if outcome.failure:  # of this mode: others may do
                record = read(target)
                record.setdefault("modes", {})[mode] = {"failed": record.pop("failed", "")}
                write(target, {"record": "torch", "row": str(row), **record})
    return driver.failed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="NAME:BATCH[:FORM][:DTYPE]; without any, all of the registry")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:2]), help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per row and mode")
    parser.add_argument("--seconds-total", type=float, default=1e9, help="of the sitting")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds per process, then it is ended")
    parser.add_argument("--need", type=float, help="seconds that a row is taken to need (less with a warm cache)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, not compiled: finds typos")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    rows = [row_of(r) for r in options.rows] or all_rows()
    if options.child:
        in_child(rows[0], options)
        return 0
    return min(1, drive(rows, options))


if __name__ == "__main__":
    sys.exit(main())
