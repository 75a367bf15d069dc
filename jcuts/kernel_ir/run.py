"""Command that runs dumped kernel programs in the reference interpreter: ``python -m jcuts.kernel_ir.run FILE.json``.

Operands come from an ``.npz`` file (by buffer name, ``--operands``), or are normal random numbers of a seed.  The
results are printed as shape, type, mean and largest magnitude, and written to an ``.npz`` file with ``--results``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.numpy_semantics import numpy_dtype
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read


def to_json(programs: Sequence[Program]) -> str:
    """The text of a file with programs, which `load` reads."""
    return json.dumps([program.to_json() for program in programs], indent=1)


def load(path: Path) -> list[Program]:
    """The programs of a file: interpreted, where NumPy checks addresses. Raises: IRError for one that is none."""
    return [read(data, signed=True) for data in json.loads(path.read_text(encoding="utf-8"))]


def random_operands(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands by buffer name: normal numbers, whole ones from 0 to 3 for integers."""
    rng = np.random.default_rng(seed)
    found = {}
    for buffer in program.inputs:
        dtype = np.dtype(numpy_dtype(buffer.dtype))
        values = rng.standard_normal(buffer.shape) if dtype.kind not in "iub" else rng.integers(0, 4, buffer.shape)
        found[buffer.name] = np.asarray(values).astype(dtype)
    return found


def run(program: Program, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of a program by buffer name."""
    results = interpret(program, [operands[buffer.name] for buffer in program.inputs])
    return {buffer.name: result for buffer, result in zip(program.outputs, results, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m jcuts.kernel_ir.run", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--program", type=int, help="number of the program in the file (default: all)")
    parser.add_argument("--operands", type=Path, help=".npz file with the operands, by buffer name")
    parser.add_argument("--results", type=Path, help=".npz file for the results of the (last) program")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    programs = load(asked.file)
    for program in programs if asked.program is None else [programs[asked.program]]:
        operands = dict(np.load(asked.operands)) if asked.operands else random_operands(program, asked.seed)
        results = run(program, operands)
        for name, value in results.items():
            wide = np.asarray(value, np.float64)
            print(f"{program.name} {name}: {value.dtype}{list(value.shape)}", end=" ")
            print(f"mean {wide.mean():.6g}, largest {np.abs(wide).max(initial=0.0):.6g}")
        if asked.results:
            np.savez(asked.results, **results)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
