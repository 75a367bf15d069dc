"""Block tile of the warp-specialised back-to-back GEMM by ``wgmma`` (capability 9.0): warpgroups, chunks, stages.

    producer warps   -> ring of stages: w1[:, chunk], w2[chunk, :], w1[:, next chunk], ...
    consumer group g -> S = x[rows of g] @ w1[:, chunk];  P = act(S);  accumulators += P @ w2[chunk, :]

A consumer warpgroup has ``high`` fragments of 64 rows, whose x stays in shared memory while it goes through all chunks.
P never leaves its registers: it is the register-sourced A operand of the second GEMM.  Shared memory: the rows of x of
all warpgroups, the ring, whose stages hold a chunk of either weight each, and the barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcuts.arch.sm_limits import SM_90
from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.b2b_gemm import B2bGemm, match_b2b_gemm
from jcuts.lower.patterns.gemm import GemmOperand
from jcuts.schedule.gpu.b2b_gemm.tile import FORM
from jcuts.schedule.gpu.gemm.wgmma_tile import BARRIER, GROUP, HIGH, KINDS, LINE
from jcuts.schedule.gpu.machine import WARP, scheduled

STEP = 32
"""Bytes along K of an instruction."""
COLUMNS_OF = 16
"""What the columns of results, and of chunks, are a multiple of: two tiles of 8."""
WIDEST = 256
"""Most columns of an instruction."""
SQUARE = 4
"""Elements of a copied piece along both directions where weights are transposed."""
PRODUCER_WARPS = 4
"""Warps of the producer warpgroup, whatever they do."""
COPYING_WARPS = 2
"""Those that issue ``cp.async`` where all weights are copied as they are; one more passes the proxy fences."""
COPYING_REGISTERS = 56
"""Least registers of a producer thread that issues ``cp.async`` (`setmaxnreg`)."""
STAGING_REGISTERS = 64
"""Least registers of a producer thread that rounds or transposes a chunk in registers."""
BESIDE_ACCUMULATORS = 32
"""Registers of a consumer thread beside its accumulators and its A fragments: addresses, loop, operands of an epilogue.
ptxas has spilled, or serialised ``wgmma``, where there were fewer."""
BESIDE_INSTRUCTION = 30
"""Registers of a thread at its entry beside the accumulators of one instruction, which ptxas insists on."""
REGISTER_STEP = 8
"""What the registers of a thread are a multiple of."""
MOST_REGISTERS = 240
"""Most registers of a consumer thread that ``setmaxnreg`` gives."""


@dataclass(frozen=True)
class B2bWgmmaTile:
    """Block tile of the back-to-back GEMM by ``wgmma``.

    Attributes:
        block: the operation.
        groups: consumer warpgroups.
        high: fragments of 64 rows of a warpgroup.
        chunk: hidden columns per chunk.
        stages: of the ring of weights.
        rounds: row tiles of a block (persistent blocks).
        beside: resident blocks per multiprocessor that registers must allow.
    """

    block: B2bGemm
    groups: int
    high: int
    chunk: int
    stages: int
    rounds: int = 1
    beside: int = 1

    @property
    def item(self) -> int:
        """Bytes of an operand element."""
        return self.block.item

    @property
    def group_rows(self) -> int:
        """Rows of a warpgroup."""
        return HIGH * self.high

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.group_rows * self.groups

    @property
    def tiles(self) -> int:
        """Row tiles."""
        return -(-self.block.rows // self.rows)

    @property
    def blocks(self) -> int:
        """Thread blocks of the grid."""
        return -(-self.tiles // self.rounds)

    @property
    def consumer_threads(self) -> int:
        """Threads that multiply."""
        return GROUP * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.consumer_threads + WARP * PRODUCER_WARPS

    # -- sizes ----------------------------------------------------------------------------------------------------
    @property
    def k_steps(self) -> int:
        """Instructions along K of the first GEMM."""
        return -(-self.block.in_channels * self.item // STEP)

    @property
    def padded_in_channels(self) -> int:
        """K of the first GEMM in lines of shared memory, zero padding included."""
        return -(-self.block.in_channels * self.item // LINE) * LINE // self.item

    @property
    def results(self) -> int:
        """Columns of the accumulators."""
        return -(-self.block.out_channels // COLUMNS_OF) * COLUMNS_OF

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.block.expanded_channels // self.chunk)

    # -- weights --------------------------------------------------------------------------------------------------
    @property
    def sides(self) -> tuple[GemmOperand, GemmOperand]:
        """Both weights."""
        first, second = self.block.weights
        assert first is not None
        return first, second

    def is_k_major(self, number: int) -> bool:
        """Whether a weight's lines in shared memory run along K: always of TF32, whose ``wgmma`` reads no others."""
        return self.item == 4 or self.sides[number].along_terms

    def is_copied(self, number: int) -> bool:
        """Whether a weight is copied as it is (``cp.async``): 16-bit, or TF32 numbers that lie along K."""
        side = self.sides[number]
        return self.item == 2 or (side.along_terms and self.block.program.buffer(side.buffer).tf32)

    @property
    def has_fence_warp(self) -> bool:
        """Whether copies arrive by themselves, so that a warp of its own passes their proxy fences."""
        return self.is_copied(0) or self.is_copied(1)

    @property
    def producer_threads(self) -> int:
        """Threads that fill the ring."""
        return WARP * (COPYING_WARPS if self.has_fence_warp else PRODUCER_WARPS)

    def weight_terms(self, number: int) -> int:
        """K of a chunk of a weight in shared memory."""
        if number:
            return self.chunk
        return self.padded_in_channels if self.is_k_major(0) else self.k_steps * STEP // self.item

    def weight_bytes(self, number: int) -> int:
        """Bytes of a chunk of a weight in shared memory."""
        columns, terms = (self.chunk, self.results)[number], self.weight_terms(number)
        if self.is_k_major(number):
            return columns * terms * self.item
        return -(-columns // HIGH) * HIGH * self.item * terms

    @property
    def stage(self) -> int:
        """Bytes of a stage: a chunk of either weight."""
        return max(self.weight_bytes(0), self.weight_bytes(1))

    # -- shared memory --------------------------------------------------------------------------------------------
    @property
    def group_bytes(self) -> int:
        """Bytes of the rows of x of a warpgroup."""
        return self.group_rows * self.padded_in_channels * self.item

    @property
    def ring(self) -> int:
        """Bytes before the ring."""
        return self.groups * self.group_bytes

    @property
    def barriers(self) -> int:
        """Bytes before the barriers: those of the ring, then one of every consumer warpgroup."""
        return self.ring + self.stages * self.stage

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        return self.barriers + BARRIER * (KINDS * self.stages + self.groups)

    # -- registers ------------------------------------------------------------------------------------------------
    @property
    def entry_registers(self) -> int:
        """Registers that every thread begins with where they are shared out."""
        return SM_90.registers_per_sm // (self.threads * self.beside) // REGISTER_STEP * REGISTER_STEP

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a consumer thread and of a producer thread, where they are shared out."""
        if self.entry_registers > MOST_REGISTERS:
            return None
        wanted = (-(-self.consumer_registers // REGISTER_STEP) + 2) * REGISTER_STEP
        whole = self.entry_registers * (self.groups + 1)
        least = COPYING_REGISTERS if self.is_copied(0) and self.is_copied(1) else STAGING_REGISTERS
        most = min(MOST_REGISTERS, (whole - least) // self.groups // REGISTER_STEP * REGISTER_STEP)
        theirs = min(most, wanted)
        return (theirs, whole - self.groups * theirs) if theirs > self.entry_registers else None

    @property
    def accumulators(self) -> int:
        """Registers of a consumer thread for accumulators of results and of a chunk."""
        return self.high * (self.results + self.chunk) // 2

    @property
    def consumer_registers(self) -> int:
        """Registers that a consumer thread needs, as estimated: A fragments do not take the place of accumulators."""
        fragments = self.high * self.chunk * self.item // 8
        return self.accumulators + fragments + BESIDE_ACCUMULATORS

    @property
    def has_registers(self) -> bool:
        """Whether ptxas should find registers for everything, as estimated."""
        has = self.entry_registers if self.registers is None else self.registers[0]
        return self.consumer_registers <= has and self.results // 2 + BESIDE_INSTRUCTION <= self.entry_registers

    @property
    def fits(self) -> bool:
        """Whether the parameters are consistent, and the weights can be brought into shared memory."""
        counts = (self.groups, self.high, self.chunk, self.rounds, self.beside)
        found = min(counts) > 0 and self.stages > 1 and self.threads <= SM_90.threads_per_block
        found = found and self.chunk % COLUMNS_OF == 0 and max(self.chunk, self.results) <= WIDEST
        found = found and not (self.is_k_major(1) and self.chunk * self.item % LINE)
        return found and all(self._is_loadable(number) for number in (0, 1))

    def _is_loadable(self, number: int) -> bool:
        """Whether threads can copy a chunk of a weight."""
        side = self.sides[number]
        if self.item == 4 and not side.along_terms:
            return side.width == SQUARE and not side.guards
        length = self.weight_terms(number) if side.along_terms else (self.chunk, self.results)[number]
        return length % side.width == 0 and side.index.stride(side.outer) is not None

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        more = (("rounds", self.rounds), ("beside", self.beside))
        params = (("groups", self.groups), ("high", self.high), ("chunk", self.chunk), ("stages", self.stages))
        return scheduled(program, FORM, self.threads, *params, *((name, n) for name, n in more if n > 1))


def wgmma_shape_of(program: Program) -> B2bWgmmaTile | None:
    """The block tile of a schedule of `b2b_gemm.wgmma_schedules`; None for other programs."""
    params: Any = dict(program.params)
    found = match_b2b_gemm(program)
    if isinstance(found, Refusal):
        return None
    groups, high, chunk, stages = (int(params[name]) for name in ("groups", "high", "chunk", "stages"))
    return B2bWgmmaTile(found, groups, high, chunk, stages, int(params.get("rounds", 1)), int(params.get("beside", 1)))
