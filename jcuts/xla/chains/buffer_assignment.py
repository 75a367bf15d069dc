"""Buffer assignment of a chain: operands, results and scratch offsets of its one custom call."""

from __future__ import annotations

from typing import Any, NamedTuple

from jcuts.trace import jaxapi
from jcuts.xla import cpu_ffi_call, cpu_launcher, cuda_launcher
from jcuts.xla.chains import arena
from jcuts.xla.chains.dataflow import Dataflow
from jcuts.xla.chains.order import Chain
from jcuts.xla.rebuild import traced_eqns

OPERAND = 0
"""Kind of a place (`CudaChainState` in the launcher): an operand of the call."""
RESULT = 1
"""A result of the call."""
SCRATCH = 2
"""Scratch memory of the call."""


def merged(chain: Chain, reads: Dataflow) -> list[Any]:
    """The equations of a chain's call; the call itself where there is only one and nothing it reads is reshaped."""
    if len(chain.calls) == 1 and reads.operands(chain.calls[0]) == list(chain.calls[0].invars):
        return chain.calls
    return BufferAssignment(chain, reads).equations()


class Call(NamedTuple):
    """One kernel of a chain.

    Attributes:
        digest: of the kernel.
        operands: what it reads.
        results: what it writes.
        updated: the operand that its first result overwrites, or None.
        start: bytes into that result at which it writes.
        scratch: bytes of its own.
        sizes: of a CPU's kernel its tiles, bytes of a scratch slot, slots; () on a GPU.
    """

    digest: str
    operands: list[Any]
    results: list[Any]
    updated: Any
    start: int
    scratch: int
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, eqn: Any, reads: Dataflow) -> Call:
        """The kernel of a call's equation."""
        attributes = dict(eqn.params["attributes"])
        results = list(eqn.outvars[: int(attributes["num_outputs"])])
        operands, digest, scratch = reads.operands(eqn), str(attributes["digest"]), int(attributes["scratch_bytes"])
        if jaxapi.call_target(eqn) == cpu_launcher.TARGET:
            sizes = int(attributes["tiles"]), scratch, int(attributes["slots"])
            return cls(digest, operands, results, None, 0, cpu_ffi_call.scratch_result_bytes(scratch, sizes[2]), sizes)
        return cls(digest, operands, results, reads.overwritten_value(eqn), int(attributes["start"]), scratch)


class BufferAssignment:
    """Buffers of a chain's kernels: operands, results and scratch offsets of its call.

    A value that a kernel makes by overwriting another has that one's memory: memories are named by their first value.
    Those that come into the chain or leave it are operands and results of the call; all others lie in its scratch
    memory, each as long as some kernel writes or reads it.

    Attributes:
        operands, results: of the call.
        aliases: numbers of operands that are overwritten -> of the results in them.
        scratch_bytes: of the call.
    """

    def __init__(self, chain: Chain, reads: Dataflow) -> None:
        self._last = chain.calls[-1]
        self._calls = [Call.of(eqn, reads) for eqn in chain.calls]
        self.operands: list[Any] = []
        self._numbers: dict[int, int] = {}  # of operands, by identity: literals are not all hashable
        self._memory: dict[Any, Any] = {}  # value made here -> its memory
        self._lives: dict[Any, list[int]] = {}  # memory -> first and last call that touch it
        self._versions: dict[Any, Any] = {}  # operand that is overwritten -> its last version
        for number, call in enumerate(self._calls):
            self._read(number, call)
            self._write(number, call)
        kept = self._read_elsewhere(set(map(id, chain.calls)), reads)
        self.results = [*kept, *(v for v in self._versions.values() if v not in kept)]
        self.aliases = {self._numbers[id(source)]: self.results.index(v) for source, v in self._versions.items()}
        self._places = self._outside()
        self._offsets, self._own, self.scratch_bytes = self._inside()

    def equations(self) -> list[Any]:
        """The equation of the call that replaces the chain's kernels."""
        digests = [call.digest for call in self._calls]
        shapes = [v.aval for v in self.results]
        sizes = [number for call in self._calls for number in call.sizes]

        def call(*xs: Any) -> Any:
            if sizes:
                return cpu_ffi_call.call_chain(
                    digests, self.numbers(), sizes, xs, shapes, arena_bytes=self.scratch_bytes
                )
            return cuda_launcher.call_chain(
                digests, self.numbers(), xs, shapes, scratch_bytes=self.scratch_bytes, aliases=self.aliases
            )

        return traced_eqns(call, self.operands, self.results, self._last)

    def numbers(self) -> list[int]:
        """Launcher data of each kernel: number of buffers, offset of its own scratch memory, and per buffer its kind
        (operand, result, scratch), number, and byte offset.
        """
        found: list[int] = []
        for call, own in zip(self._calls, self._own, strict=True):
            found += [len(call.operands) + len(call.results), own]
            for value in call.operands:
                found += self._place(value, 0)
            for k, value in enumerate(call.results):
                found += self._place(value, 0 if k else call.start)
        return found

    # ------------------------------------------------------------ following values from call to call

    def _read(self, number: int, call: Call) -> None:
        for a in call.operands:
            if not jaxapi.is_literal(a) and a in self._memory:
                self._touch(self._memory[a], number)
            elif id(a) not in self._numbers:
                self._numbers[id(a)] = len(self.operands)
                self.operands.append(a)

    def _write(self, number: int, call: Call) -> None:
        for k, v in enumerate(call.results):
            overwrites = k == 0 and call.updated is not None
            self._memory[v] = self._memory.get(call.updated, call.updated) if overwrites else v
            self._touch(self._memory[v], number)
        if call.updated is not None and id(memory := self._memory[call.results[0]]) in self._numbers:
            self._versions[memory] = call.results[0]

    def _touch(self, memory: Any, number: int) -> None:
        self._lives.setdefault(memory, [number, number])[1] = number

    def _read_elsewhere(self, inside: set[int], reads: Dataflow) -> list[Any]:
        """Values defined in the chain that are read outside it. Args: inside: identities of the chain's equations."""
        return [
            v
            for v in self._memory
            if not jaxapi.is_dropvar(v) and any(r is None or id(r) not in inside for r in reads.readers.get(v, []))
        ]

    # ------------------------------------------------------------ giving them places

    def _outside(self) -> dict[Any, tuple[int, int]]:
        """Kind and number of buffers that are operands or results of the chain."""
        places: dict[Any, tuple[int, int]] = {self._memory[v]: (RESULT, k) for k, v in enumerate(self.results)}
        for k, a in enumerate(self.operands):
            if not jaxapi.is_literal(a):
                places.setdefault(a, (OPERAND, k))
        return places

    def _inside(self) -> tuple[dict[Any, int], list[int], int]:
        """Scratch offsets of all other buffers, and of each kernel's own scratch, and the total size [B]."""
        local = [memory for memory in self._lives if memory not in self._places]
        lives = [(*self._lives[memory], jaxapi.nbytes(memory)) for memory in local]
        own = [(number, number, call.scratch) for number, call in enumerate(self._calls)]
        offsets, size = arena.assign_offsets([(first, last, length) for first, last, length in (*lives, *own)])
        return dict(zip(local, offsets, strict=False)), offsets[len(local) :], size

    def _place(self, value: Any, start: int) -> list[int]:
        """Kind, number and byte offset of a buffer. Args: start: bytes into the value."""
        if jaxapi.is_literal(value):
            return [OPERAND, self._numbers[id(value)], start]
        memory = self._memory.get(value, value)
        kind, number = self._places.get(memory, (SCRATCH, 0))
        return [kind, number, start + self._offsets.get(memory, 0)]
