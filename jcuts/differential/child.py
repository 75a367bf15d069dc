"""Child process of `jcuts.verify`: runs a program in the ways that it is asked for, and judges the results.

``python -m jcuts.differential.child FOLDER DESCRIPTOR`` reads requests from standard input, a JSON object a line, and
answers on a pipe of its own: XLA and the user's program may write to standard output.  It says what it begins before it
begins it, so that the parent knows what a crash or a hang belongs to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import summary
from jcuts.differential import judge, program_text
from jcuts.differential.ways import OP_BY_OP, WAYS, XLA, Run
from jcuts.trace import jaxapi
from jcuts.tune.verify.inputs import load

Sets = Sequence[tuple[str, Sequence[np.ndarray]]]
EACH_EQUATION = "each equation"
"""Request that looks for the first equation that is wrong by itself."""
ERROR = "error"


class Server:
    """The program of a folder, its inputs, and what is computed once for several requests."""

    def __init__(self, folder: Path, answers: Any) -> None:
        self.answers = answers
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        jax.config.update("jax_enable_x64", about["x64"])
        if about["matmul_precision"]:
            jax.config.update("jax_default_matmul_precision", about["matmul_precision"])
        types = [(tuple(shape), dtype) for shape, dtype in about["types"]]
        constants = [
            load(folder / f"constant{k}.npy", shape, dtype) for k, (shape, dtype) in enumerate(about["constants"])
        ]
        self.closed = program_text.retraced((folder / "program.py").read_text(encoding="utf-8"), constants, types)
        if program_text.names_of(self.closed) != about["primitives"]:
            raise RuntimeError("the program is another one when it is traced again")
        self.platform, self.tolerance = about["platform"], about["tolerance"]
        self.refused = frozenset(about["refused"])
        self.sets: Sets = [
            (kind, [load(folder / f"set{n}.in{k}.npy", *spec) for k, spec in enumerate(types)])
            for n, kind in enumerate(about["kinds"])
        ]
        self.values: list[dict[Any, Any]] | None = None
        self.references: dict[tuple[int, int], list[Any]] = {}

    def say(self, **message: Any) -> None:
        """One line to the parent."""
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request: a verdict as JSON data."""
        start, stop = request.get("window") or (0, len(self.closed.jaxpr.eqns))
        whole = (start, stop) == (0, len(self.closed.jaxpr.eqns))
        part = self.closed if whole else program_text.window(self.closed, start, stop)
        if request.get("compile"):
            return self._compile(part)
        sets = self.sets if whole else self._operands(part)
        if request.get("save"):
            return self._save((start, stop), part, sets, Path(request["save"]))
        if request["way"] == EACH_EQUATION:
            return self._each_equation()
        expected = self._expected((start, stop), part, sets)
        run = Run(self.platform, request.get("options") or {}, self.refused, request.get("tune", "off"))
        self.say(stage="run", way=request["way"])
        begun = time.perf_counter()
        if request["way"] == OP_BY_OP:  # as the registry's, but that every equation is announced
            results = [self._told(part, inputs) for _, inputs in sets]
        else:
            program = WAYS[request["way"]].build(part, run)
            results = [program(*inputs) for _, inputs in sets]
        got = [[np.asarray(x) for x in found] for found in results]
        seconds = time.perf_counter() - begun
        self.say(stage="judge")
        verdict = judge.judge(judge.problem_of(part, self.tolerance), expected, got)
        return {**verdict.to_dict(), "seconds": seconds, "notes": run.notes}

    def _told(self, part: jaxapi.Closed, inputs: Sequence[Any]) -> list[Any]:
        """Equation by equation, each announced."""
        known = judge.operand_values(part, inputs, lambda number: self.say(stage="run", equation=number))
        return [a.val if jaxapi.is_literal(a) else known[a] for a in part.jaxpr.outvars]

    def _operands(self, part: jaxapi.Closed) -> Sets:
        """Inputs of a part of the program: what the equations in front of it give op by op."""
        if self.values is None:
            self.say(stage="operands")
            self.values = [judge.operand_values(self.closed, inputs) for _, inputs in self.sets]
        return [
            (kind, [np.asarray(known[v]) for v in part.jaxpr.invars])
            for (kind, _), known in zip(self.sets, self.values, strict=True)
        ]

    def _expected(self, place: tuple[int, int], part: jaxapi.Closed, sets: Sets) -> list[Any]:
        if place not in self.references:
            self.say(stage="reference")
            reference = judge.Reference(part, self.platform, self.refused)
            self.references[place] = [reference.expected(kind, inputs) for kind, inputs in sets]
        return self.references[place]

    def _each_equation(self) -> dict[str, Any]:
        def check(alone: jaxapi.Closed, operands: Sets, got: Sequence[Any]) -> judge.Verdict:
            reference = judge.Reference(alone, self.platform, self.refused)
            expected = [reference.expected(kind, inputs) for kind, inputs in operands]
            return judge.judge(judge.problem_of(alone, self.tolerance), expected, got)

        self.say(stage="run", way=EACH_EQUATION)
        found = judge.first_wrong_equation(self.closed, self.sets, check)
        if found is None:
            return judge.Verdict(judge.OK).to_dict()
        return {**found[1].to_dict(), "equation": found[0]}

    def _compile(self, part: jaxapi.Closed) -> dict[str, Any]:
        """Compiles a part as XLA ships it, for what the compiler dumps; nothing is run."""
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in part.jaxpr.invars]  # type: ignore[attr-defined]
        self.say(stage="run", way=XLA)
        jax.jit(lambda *xs: jaxapi.eval_closed(part, *xs)).lower(*types).compile()
        return {"status": judge.OK}

    def _save(self, place: tuple[int, int], part: jaxapi.Closed, sets: Sets, target: Path) -> dict[str, Any]:
        """Operands of a part, and its float64 results rounded to their types, as one .npz file."""
        arrays: dict[str, np.ndarray] = {}
        for n, ((_, inputs), expected) in enumerate(zip(sets, self._expected(place, part, sets), strict=True)):
            arrays |= {f"set{n}.in{k}": _plain(x) for k, x in enumerate(inputs)}
            arrays |= {f"set{n}.out{k}": _plain(e.xla) for k, e in enumerate(expected)}
        np.savez(target, **arrays)  # type: ignore[arg-type]
        return {"status": judge.OK}


def _plain(array: np.ndarray) -> np.ndarray:
    """An array that the .npy format knows: ml_dtypes' types as the integers behind them."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def main(folder: str, descriptor: str) -> None:
    """Answers requests until standard input ends."""
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answers:
        server = Server(Path(folder), answers)
        server.say(stage="ready")
        for line in sys.stdin:
            try:
                server.say(answer=server.handle(json.loads(line)))
            except Exception as error:  # an error of XLA or of jcuts is a result
                server.say(answer={"status": ERROR, "message": summary(error)[:500]})


if __name__ == "__main__":
    main(*sys.argv[1:])
