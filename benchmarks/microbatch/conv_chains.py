"""The convolutions of a training step as one program, every one by cuDNN: WR against WD, measured and not added up.

All kernels of the step in its order, each with its division, in one XLA program that XLA may capture into CUDA graphs;
nothing else of the step is in it, so it compiles in seconds.  Its temporary memory is what XLA takes for workspaces.
Run by `gpu_tables.py --items chains`, which measures the divisions' times first.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 12
"""Programs that compile at once."""
ROUNDS = 3
CALLS = 3


def text(size: int) -> str:
    """A number of bytes, short."""
    return f"{size / 2**20:.3g} MiB" if size >= 1 << 20 else f"{size / 1024:.3g} KiB"


def whole(table: Any) -> Any:
    """A table without slices of the outputs."""
    from jcuts.microbatch.timings import unsliced

    return dataclasses.replace(table, micros=tuple(m for m in table.micros if unsliced(m.algorithm)[1] == 1))


def programs(network: Any, database: Any, device: Any, limits: Sequence[int]) -> dict[str, list[Any]]:
    """Divisions of every kernel by name of the program: WR and single calls at each limit, WD at WR's total there.

    *WR at WD's largest* is WR within the largest workspace that WD gives a kernel: at equal memory where calls that run
    one after the other share theirs.
    """
    from jcuts.base.errors import JcutsError
    from jcuts.microbatch import batch_division_dp
    from jcuts.microbatch.analysis import analyse, tables_of

    tables = tables_of(network, database, device)
    pairs = list(zip(network.uses, tables, strict=True))
    middle = limits[len(limits) // 2]

    def single(limit: int | None) -> list[Any]:
        found = [batch_division_dp.undivided(table, use.batch, limit, precision=use.precision) for use, table in pairs]
        if None in found:
            raise JcutsError("a kernel has no algorithm there")
        return found

    made: dict[str, list[Any]] = {}

    def add(name: str, divisions: Callable[[], list[Any]]) -> list[Any] | None:
        try:
            made[name] = divisions()
        except JcutsError:
            return None
        return made[name]

    add("single calls, no limit", lambda: single(None))
    for limit in (middle, *(n for n in limits if n != middle)):
        at = text(limit)
        add(f"single calls, {at}", lambda limit=limit: single(limit))
        pieces = add(
            f"WR {at}",
            lambda limit=limit: [row.division for row in analyse(network, database, device, limit=limit).rows],
        )
        if pieces is None:
            continue
        if limit == middle:
            add(
                f"WR {at}, pieces of the batch only",
                lambda limit=limit: [
                    batch_division_dp.divide(whole(table), use.batch, limit, precision=use.precision)
                    for use, table in pairs
                ],
            )
        total = sum(division.workspace for division in pieces)
        shared = add(
            f"WD at WR's total at {at}",
            lambda total=total: [row.division for row in analyse(network, database, device, total=total).rows],
        )
        if shared:
            largest = max(division.workspace for division in shared)
            add(
                f"WR at WD's largest at {at}",
                lambda largest=largest: [
                    row.division for row in analyse(network, database, device, limit=largest).rows
                ],
            )
    return made


def chain(network: Any, divisions: Sequence[Any], platform: str) -> tuple[Callable[..., Any], list[Any]]:
    """A function of operands (one array of every shape), and their types: results of all kernels."""
    import jax

    from jcuts.xla.cudnn import call as cudnn_call
    from jcuts.xla.cudnn.match import library_function

    known: dict[tuple[Any, ...], int] = {}
    avals: list[Any] = []
    places: list[tuple[int, int, Any]] = []
    for use in network.uses:
        function, operands = library_function(use.convolution, use.batch)
        numbers = []
        for aval in operands:
            key = (aval.shape, str(aval.dtype))
            if key not in known:
                known[key] = len(avals)
                avals.append(aval)
            numbers.append(known[key])
        places.append((numbers[0], numbers[1], jax.eval_shape(function, *operands)))

    def run(*arrays: Any) -> list[Any]:
        return [
            cudnn_call.call(
                use.convolution,
                division,
                (arrays[a], arrays[b]),
                result,
                layer=use.name,
                orders=[tuple(range(len(result.shape)))] * 3,
                platform=platform,
                graph=True,
            )
            for use, division, (a, b, result) in zip(network.uses, divisions, places, strict=True)
        ]

    return run, avals


def chains(run: Any, network: Any, budget: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Seconds and memory of every program of a network whose kernels are timed; kept whenever one more is known."""
    import jax
    import numpy as np

    made = programs(network, run.by_cudnn, run.device, run.limits)
    end = time.monotonic() + budget
    avals: list[Any] = []
    functions = {}
    for name, divisions in made.items():
        functions[name], avals = chain(network, divisions, run.platform)
    block = 0.1 * np.random.default_rng(0).standard_normal(1 << 20)
    arrays = [jax.device_put(np.resize(block.astype(aval.dtype), aval.shape)) for aval in avals]
    found: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    calls = 1 if run.dry else CALLS

    def sample(name: str) -> None:
        begin = time.perf_counter()
        result = None
        for _ in range(calls):
            result = None  # the next call's results take the same memory: CUDA graphs stay as they are
            result = compiled[name](*arrays)
        jax.block_until_ready(result)
        samples = [*found[name].get("samples", []), (time.perf_counter() - begin) / calls]
        found[name] |= {"seconds": sorted(samples)[len(samples) // 2], "samples": samples}

    with ThreadPoolExecutor(THREADS) as pool:
        waiting = {
            name: pool.submit(lambda function: jax.jit(function).lower(*avals).compile(), function)
            for name, function in functions.items()
        }
        for name, divisions in made.items():
            spaces = [division.workspace for division in divisions]
            found[name] = {
                "added up": sum(division.seconds for division in divisions),
                "sum of workspaces": sum(spaces),
                "largest": max(spaces),
                "in pieces": sum(len(division.parts) > 1 for division in divisions),
                "in slices": sum("slices" in str(division) for division in divisions),
            }
            try:
                program = waiting[name].result()
                analysis = program.memory_analysis()
                found[name]["temporary bytes"] = analysis and int(analysis.temp_size_in_bytes)
                for _ in range(2):
                    jax.block_until_ready(program(*arrays))
                compiled[name] = program
                sample(name)
            except Exception as error:  # the other programs are still worth having
                found[name]["error"] = str(error)[:300]
            keep(found)
    for _ in range(ROUNDS):
        for name in compiled:
            if time.monotonic() < end:
                sample(name)
    return found


def lines(key: str, found: dict[str, Any]) -> list[str]:
    """One network as text."""
    made = [f"{key}:"]
    for name, row in found.items():
        took = row.get("error") or f"{1e3 * min(row['samples']):.2f} ms (added up {1e3 * row['added up']:.2f})"
        temporary = json.dumps(row.get("temporary bytes"))
        made.append(f"  {name}: {took}; temporary {temporary}, sum {text(row['sum of workspaces'])}")
    return made
