"""Exports a jaxpr as files that run without jcuts: StableHLO by ``jax.export``, and a Python script that calls it.

Constants are part of the serialised program.  Programs with callbacks, other effects or sharded values cannot be
exported and get no files.
"""

from __future__ import annotations

import logging

import jax
from jax import export

from jcuts.trace import jaxapi

log = logging.getLogger("jcuts.dump")

_SCRIPT = '''"""Runs a dumped jaxpr again: call ``program(*operands)``, or run this file for random operands."""
import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_enable_x64", {x64})
program = jax.export.deserialize(Path(__file__).with_suffix(".stablehlo").read_bytes()).call

# {signature}
OPERANDS = {operands}

if __name__ == "__main__":
    if len(sys.argv) > 1:  # an .npz file with arrays arr_0, arr_1, ...
        operands = list(np.load(sys.argv[1]).values())
    else:
        rng = np.random.default_rng(0)
        operands = [np.asarray(3 * rng.standard_normal(shape)).astype(dtype) for shape, dtype in OPERANDS]
    for result in program(*operands):
        print(result.dtype, list(result.shape), np.asarray(result))
'''


def runnable_files(closed: jaxapi.Closed) -> dict[str, bytes]:
    """The files by suffix ('py' and 'stablehlo'); none where the program cannot be exported."""
    if jaxapi.has_effects(closed):
        return {}
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
    try:
        exported = export.export(jax.jit(lambda *xs: jaxapi.eval_closed(closed, *xs)), platforms=["cpu"])(*operands)
        data = exported.serialize()
    except Exception as error:  # what cannot be exported is many kinds of errors; a dump never stops a program
        log.info("no runnable file: %s", error)
        return {}
    script = _SCRIPT.format(
        x64=jaxapi.x64_enabled(),
        signature=" -> ".join(", ".join(map(str, avals)) for avals in (closed.in_avals, closed.out_avals)),
        operands=[(tuple(o.shape), str(o.dtype)) for o in operands],
    )
    return {"py": script.encode(), "stablehlo": bytes(data)}
