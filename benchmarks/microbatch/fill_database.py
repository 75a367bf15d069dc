"""Networks whose kernels are timed by a run of `gpu_tables.py`, and their convolutions as programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.microbatch import conv_chains
from benchmarks.microbatch.modelled_device import training_step
from benchmarks.microbatch.table_run import BATCHES, MODES, BudgetSpent, Run, in_mode, precisions_of
from benchmarks.microbatch.training_models import gradients, inputs_of


def kernels_of(run: Run, name: str, dtype: str) -> Any:
    """The network, and its distinct convolutions."""
    network = training_step(name, BATCHES[name], dtype)
    if run.dry:
        uses = traced(name, 4).uses
        uses = [dataclasses.replace(u, convolution=dataclasses.replace(u.convolution, dtype=dtype)) for u in uses]
        network = dataclasses.replace(network, uses=tuple(uses))
    return network, list({use.convolution.key: use for use in network.uses}.values())


def traced(name: str, batch: int, *, tiny: bool = True) -> Any:
    """The convolutions of a step, from its jaxpr."""
    from jcuts.pipeline import microbatch_convs

    return microbatch_convs.network_of(traced_step(name, batch, tiny=tiny), name)


def traced_step(name: str, batch: int, *, tiny: bool = True) -> Any:
    """The flat jaxpr of a step."""
    import jax

    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    arguments = inputs_of(name, batch, tiny=tiny)
    return simplify(inline(jax.make_jaxpr(gradients(name, "highest", tiny=tiny))(*arguments)))


def fill_network(
    run: Run, name: str, *, dtype: str = "float32", library: bool = False, spare: float = 20.0
) -> tuple[Any, str]:
    """A network with all its times, or why not.

    Args: library: XLA's own convolutions, too; spare: seconds that are not for timing.
    """
    from jcuts.tune.cudnn.measurer import measured

    network, uses = kernels_of(run, name, dtype)
    precisions = ("float32",) if dtype == "float16" else ("float32", "tf32")
    with run.measurer(spare) as measurer:
        for use in uses:
            try:
                run.fill(measurer, use.convolution, use.batch, run.limits, precisions)
                if library:
                    measured(use.convolution, use.batch, run.database, measurer, policy="undivided")
                run.lacking.discard(use.convolution.key)
            except BudgetSpent:
                run.lacking.add(use.convolution.key)
            if not run.database.missing(run.device, use.convolution, (use.batch,)):
                run.note(use.convolution)
        run.left_out += measurer.left_out
    run.save_tables()
    timed = sum(use.convolution.key not in run.lacking for use in uses)
    if timed < len(uses):
        return network, f"the budget was spent after {timed} of {len(uses)} kernels"
    run.say(f"{name}, {dtype}: {len(uses)} distinct kernels are timed")
    return network, ""


def chained(run: Run, name: str, network: Any, found: dict[str, Any]) -> None:
    """One network, whose kernels are timed, in every precision of its type."""
    for precision in precisions_of(run, network.uses[0].convolution.dtype):
        if run.left < 15:
            break
        key = f"{name}, batch {network.uses[0].batch}, {MODES[precision]}"

        def keep(rows: dict[str, Any], key: str = key) -> None:
            found[key] = rows
            run.save("chains", found)

        found[key] = conv_chains.chains(run, in_mode(network, precision), run.left - 10, keep)
        run.say("\n".join(conv_chains.lines(key, found[key])))
        run.save("chains", found)
