"""Mutated JSON of the programs of all templates: refused with a typed error, or inside their buffers.

`python -m tests.kernel_ir.fuzz [mutations]` prints how many of each there were.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import IRError, JcutsError, Refusal
from jcuts.codegen.cpu.compile import compile_program
from jcuts.codegen.cpu.emit import emit_source
from jcuts.codegen.cuda.compile import sources_of
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.numpy_semantics import numpy_dtype
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read
from jcuts.lower import weight_transpose
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.cpu import winograd_candidates
from jcuts.schedule.gpu import candidates as gpu_candidates
from tests import programs
from tests.codegen.cuda.inverted_residual.test_kernel import BLOCKS
from tests.codegen.cuda.inverted_residual.test_kernel import program_of as block_of
from tests.gpu.cases import CASES as GPU_CASES
from tests.gpu.cases import Case, attention, normal
from tests.ops.cases import CASES, conv, make

MORE: dict[str, Case] = {
    "product": (lambda x, w: jax.nn.relu(x @ w), (normal(48, 64), normal(64, 32))),
    "product small": (lambda x, w: x @ w, (normal(5, 7), normal(7, 6))),
    "product odd": (lambda x, w: x @ w, (normal(33, 40), normal(40, 24))),
    "convolution": (conv, (normal(1, 12, 12, 16), normal(3, 3, 16, 16))),
    "convolution small": (conv, (normal(1, 6, 7, 2), normal(3, 3, 2, 3))),
    "convolution of tiles": (conv, (normal(1, 16, 16, 32), normal(3, 3, 32, 32))),
    "softmax": (jax.nn.softmax, (normal(6, 20),)),
    "transposed": (lambda x: x.T + 1, (normal(64, 48),)),
}
"""Functions whose templates other tests take larger ones for."""
MUTATIONS, SEED = 10_000, 7
MOST_POINTS = 20_000
"""Points of programs that are interpreted; larger ones are verified only."""
GPU = gpu_candidates.GpuMachine(132)
COMPILED = 12
"""Accepted programs that are compiled."""
ODD_NUMBERS = (-1, 0, 1, 2, 3, 5, 16, 255, 1 << 20, 1 << 31, 1 << 53, 1 << 63, 1 << 64, -(1 << 63), 10**40, 0.5, -0.0)


@dataclass
class Counts:
    """What became of the mutations."""

    programs: int = 0
    templates: Counter[str] = field(default_factory=Counter)
    mutations: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    interpreted: int = 0
    compiled: int = 0

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {name}" for name, count in self.refused.most_common())
        return (
            f"{self.programs} programs of {len(self.templates)} templates ({', '.join(sorted(self.templates))}); "
            f"{self.mutations} mutations: {sum(self.refused.values())} typed errors ({refused}), {self.accepted} "
            f"accepted, {self.interpreted} of these interpreted, {self.compiled} compiled; nothing was executed, and "
            "nothing is out of bounds"
        )


def corpus() -> list[Program]:
    """Programs of every template, unscheduled and scheduled, for CPUs and for GPUs."""
    found: dict[str, Program] = {}

    def add(program: Program) -> None:
        found.setdefault(program.digest, program)

    def add_all(built: Program | Refusal, most: int) -> None:
        if isinstance(built, Refusal):
            return
        add(built)
        ranked = [p for p, _ in cpu_candidates.candidates(built, programs.MACHINE, 100)]
        for template in dict.fromkeys(p.template for p in ranked):
            for one in [p for p in ranked if p.template == template][:most]:
                add(one)
        for one, _ in winograd_candidates.candidates(built, programs.MACHINE)[:most]:
            add(one)
        for_gpus = [p for p, _ in gpu_candidates.candidates(built, GPU, 40)]
        for form in dict.fromkeys(dict(p.params)["cuda"] for p in for_gpus):
            for one in [p for p in for_gpus if dict(p.params)["cuda"] == form][:most]:
                add(one)

    for case in CASES:
        if case.golden:
            add_all(programs.trace(case.call, *(make(text) for text in case.inputs)).build(), 2)
    for fn, arguments in (*GPU_CASES.values(), *MORE.values()):
        if sum(a.size for a in arguments) <= 50_000:
            add_all(programs.trace(fn, *arguments).build(), 3)
    for one in (BLOCKS["5x5"], BLOCKS["residual"]):
        arguments = one.arguments()
        add_all(block_of(one, arguments)[0], 2)
    shapes = [normal(1, 32, 2, 16, seed=k) for k in range(3)]
    add_all(programs.trace(attention(), *shapes).attention()[1], 3)
    turned = weight_transpose.transpose_program([((64, 32), (32, 64)), ((3, 20), (20, 3))])
    assert turned is not None
    add(turned)
    return list(found.values())


class Mutator:
    """Makes one change somewhere in the JSON of a program."""

    def __init__(self, seed: int, canary: Path) -> None:
        self.random = random.Random(seed)
        code = f"open({str(canary)!r}, 'w').write('x')"
        self.strings = (
            "",
            "x",
            "d0",
            "in0",
            "out0",
            "local0",
            "float32",
            "int8",
            "add",
            "load",
            "const",
            "0x1.8000000000000p+3",
            f"a\n    {code}\n    #",
            f"a\n{code}",
            f"d0 = {code}",
            f"__import__('os').system('touch {canary}')",
            f"{{{code}}}",
            "for",
            "tile",
            "buffers",
            "d0_lo",
            "../../x",
            "a\0b",
            "\u202e",
            "x" * 5000,
            "nan",
        )

    def changed(self, data: dict[str, Any]) -> dict[str, Any]:
        """A copy with one change, or two."""
        made = copy.deepcopy(data)
        for _ in range(self.random.choice((1, 1, 1, 2))):
            places = list(_places(made))
            holder, key = self.random.choice(places)
            self._change(holder, key)
        return made

    def _change(self, holder: Any, key: Any) -> None:
        value, draw = holder[key], self.random.random()
        if draw < 0.1:
            if isinstance(holder, list) and self.random.random() < 0.5:
                holder.insert(key, copy.deepcopy(value))
            else:
                del holder[key]
        elif draw < 0.15 and isinstance(value, dict):
            value[self.random.choice(self.strings)] = self._any()
        elif draw < 0.2 and isinstance(value, list) and len(value) > 1:
            self.random.shuffle(value)
        elif isinstance(value, bool):
            holder[key] = self.random.choice((not value, 1, "true", None))
        elif isinstance(value, int):
            near = value + self.random.choice((-2, -1, 1, 2, 3)), value * 2, -value, value // 2, value + 17
            holder[key] = self.random.choice(near) if draw < 0.75 else self._any()
        elif isinstance(value, str) and draw < 0.8:
            holder[key] = self.random.choice(self.strings)
        elif draw < 0.5:
            holder[key] = self._any()

    def _any(self) -> Any:
        return self.random.choice(
            (
                self.random.choice(ODD_NUMBERS),
                self.random.choice(self.strings),
                None,
                True,
                [],
                {},
                [[]],
                float("nan"),
                float("inf"),
                [0, [1, "d0"]],
                [3, [2, ["div", [0, [1, "d0"]], 4]]],
            )
        )


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def points(program: Program) -> int:
    """How many points an interpreter would visit, roughly."""
    total = 0
    for phase in program.phases:
        count = 1
        for axis in (*phase.axes, *phase.reds):
            count *= axis.extent
        total += count * max(1, len(phase.body.nodes) + len(phase.exit.nodes))
    return total + sum(b.size for b in program.buffers)


def stays_inside(program: Program) -> bool:
    """Runs a program in the interpreter, if it is small. Raises AssertionError where an address leaves its buffer."""
    tasks = program.tiles * max(1, sum(g.extent for g in program.grid if g.axis in program.serial))
    if points(program) > MOST_POINTS or tasks > 64:
        return False
    random_ = np.random.default_rng(0)
    operands = []
    for buffer in program.inputs:
        values = random_.standard_normal(buffer.shape) * 50
        operands.append(np.asarray(values).astype(numpy_dtype(buffer.dtype)))
    try:
        interpret(program, operands)
    except IRError as error:  # results written twice or never are wrong, and for the check of results to find
        text = str(error)
        assert "loads" not in text and "stores" not in text, f"{text}\n{program.to_text()}"
    return True


def run(mutations: int, canary: Path, seed: int = SEED) -> Counts:
    """Mutates; raises AssertionError for whatever is neither a typed error nor inside its buffers."""
    known = corpus()
    counts = Counts(len(known), Counter(p.template for p in known))
    texts = [p.to_json() for p in known]
    mutator = Mutator(seed, canary)
    order = sorted(range(len(texts)), key=lambda k: points(known[k]))
    compiled: list[Program] = []
    for number in range(mutations):
        k = order[number % len(order)]
        data = mutator.changed(texts[k])
        while data == texts[k]:
            data = mutator.changed(texts[k])
        counts.mutations += 1
        try:
            program = read(data)
        except JcutsError as error:
            counts.refused[type(error).__name__] += 1
            continue
        counts.accepted += 1
        with np.errstate(all="ignore"):
            counts.interpreted += stays_inside(program)
        try:  # the text that would be compiled
            sources = sources_of(program)[1] if "cuda" in dict(program.params) else [emit_source(program)]
            for source in sources:
                compile(source.text, "<kernel>", "exec")
        except JcutsError:
            continue
        if "cuda" not in dict(program.params) and points(program) < MOST_POINTS:
            compiled.append(program)
    for program in compiled[:: max(1, len(compiled) // COMPILED)][:COMPILED]:
        try:
            compile_program(program)
            counts.compiled += 1
        except JcutsError:
            continue
    assert not canary.exists(), "text of a program was executed"
    return counts


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else MUTATIONS, Path("/tmp/jcuts-fuzz-canary")))
