"""A matrix product as the schedules for warpgroups (``wgmma.mma_async``) see it: what fits, and what it takes.

`WgmmaProblem` adds to `schedule.gpu.gemm.problem.GemmProblem` what decides among those schedules: whether operands are
copied or staged through registers (TF32 rounding), the prologue, the epilogue's operands, the size of the grid.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate import batch
from jcuts.estimate.time_model import TimeTerm
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.conv_window import gather_per_copy
from jcuts.lower.patterns.gemm import GemmOperand, k_tiles_per_split, k_vectors, prologue, prologue_is_zero_safe
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm import cost as gemm_cost
from jcuts.schedule.gpu.gemm import cost_tf32
from jcuts.schedule.gpu.gemm.mma import LATENCY, bound_rates
from jcuts.schedule.gpu.gemm.problem import GemmProblem, column_sum_registers
from jcuts.schedule.gpu.gemm.wgmma_tile import HIGH, SHARED, WgmmaTile, WgmmaTiles, smem_with_dsmem
from jcuts.schedule.gpu.machine import GpuMachine, unit_rate

_CANDIDATES = fit.coefficients("gpu/gemm", "wgmma_candidates")
RESIDUAL_REGISTERS_PER_ACC = _CANDIDATES.residual_registers_per_accumulator
"""Registers per total for each operand that is added to the results one by one: the assembler asks for it early."""
FEW_POINTS = 128 * 128
"""Outputs per multiprocessor up to which a product has few blocks."""
FRAGMENTS = 16
"""Registers of fragments on their way to the units, per 64 rows of a warpgroup."""
WHOLE = 32
"""The same where all k-steps of a tile are one instruction group."""
MOST_SHARED = 226 << 10
"""Bytes of shared memory of a block."""
MOST_REGISTERS = 248
"""Registers of a thread."""
MOST_WAITING = 80
"""Registers of a thread for tiles in flight."""
FILE = SM_90.registers_per_sm


class WgmmaProblem(GemmProblem):
    """Counts shared memory, registers and cycles of a GEMM's ``wgmma`` schedules."""

    def __init__(self, program: Program, machine: GpuMachine) -> None:
        super().__init__(program, machine)
        used = {n.buffer for n in program.phases[0].exit.nodes if n.op == "load"}
        self.beside = sum(b.name in used and b.size >= self.stored[0].size for b in program.inputs)
        self.program = program
        self.narrow = self.item == 2 and not self.sides[1].along_terms  # lanes have two columns side by side
        by_terms = all(side.along_terms for side in self.sides)
        self.rounded = int(by_terms and program.buffer(self.sides[1].buffer).tf32)
        self.before, self.vectors = prologue(program) is not None, len(k_vectors(program))
        self.through = int(self.rounded or (self.before and self.item == 2))
        self.ragged = self.before and prologue_is_zero_safe(program)
        self.pieces = gather_per_copy(program, *self.sides)
        products = float(self.batch * self.rows * self.columns * self.terms)
        few = self.batch * self.rows * self.columns <= machine.sms * FEW_POINTS
        self.short, self.few = bool(self.rounded) and few, self.item == 2 and few
        reached = unit_rate(machine.coefficients("gpu/gemm", "wgmma_candidates"), self.item)  # by long sums
        rates = cost_tf32.rates_of(machine)
        self.rates = replace(rates, products_per_cycle=reached) if self.item == 2 else rates
        self.unit = self.rates.products_per_cycle if self.rounded else reached
        memory = bound_rates(machine).memory_bytes_per_cycle
        self.least = max(self.moved / memory, products / (machine.sms * self.unit), LATENCY)

    @property
    def small_grid(self) -> WgmmaProblem:
        """The same for schedules of few blocks."""
        made = copy.copy(self)
        made.short, made.few = True, False
        return made

    def fits_prologue(self, terms: int, split: int = 1) -> bool:
        """Whether what stands before the product allows for blocks of so many terms, and so many parts of the grid."""
        if not self.before:
            return True
        whole = self.terms % (terms * split) == 0
        return bool(self.through) and (whole or (self.ragged and split == 1))

    def k_tiles_per_block(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """k-tiles of a block."""
        return k_tiles_per_split(self.terms, tiling.terms, tiling.split * tiling.cluster)[0]

    def fits(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """Whether a multiprocessor has a block's shared memory and registers."""
        registers = batch.minimum(MOST_REGISTERS, FILE // tiling.threads)
        return (self.shared(tiling) <= MOST_SHARED) & (self.registers(tiling) <= registers)

    def shared(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """Bytes of shared memory of a block."""
        rows, columns = (
            size if side.along_terms or side.item == 4 else -(-size // HIGH) * HIGH
            for side, size in zip(self.sides, (tiling.rows, tiling.columns), strict=True)
        )
        kept = (rows + columns) * tiling.terms * self.item * tiling.stages
        kept = kept + 4 * self.vectors * self.k_tiles_per_block(tiling) * tiling.terms
        alone = batch.maximum(kept, batch.where(tiling.cluster > 1, 4 * rows * columns, 0))
        if not batch.is_any(tiling.push):
            return alone
        return batch.where(tiling.push > 0, smem_with_dsmem(kept, tiling.room), alone)

    def copies_are_16_bytes(self, rows: int, columns: int) -> bool:
        """Whether such tiles are copied in whole pieces."""
        return all(_fits(side, size) for side, size in zip(self.sides, (rows, columns), strict=True))

    def staging_registers(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """What a thread takes of a tile of float32: whole pieces, or squares, of each operand."""
        total = 0
        for side, size in zip(self.sides, (tiling.rows, tiling.columns), strict=True):
            piece = side.width if side.along_terms else 16
            total = total - (-size * tiling.terms // (piece * tiling.threads)) * piece
        return total

    def registers(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """32-bit registers of a thread, roughly."""
        total = tiling.rows * tiling.columns // tiling.threads
        waiting = tiling.flight * self.staging_registers(tiling)
        if tiling.rounded:
            waiting = (FRAGMENTS if tiling.steps else WHOLE) * tiling.rows // tiling.groups[0] // HIGH
        if tiling.rounded:
            total = total + batch.floor(RESIDUAL_REGISTERS_PER_ACC * total) * self.beside
        total = total + column_sum_registers(self.sums, tiling.columns // tiling.groups[1])
        beyond = batch.where(waiting <= MOST_WAITING, 0, MOST_REGISTERS)
        return 56 + total + batch.where(waiting == 0, 8, waiting) + beyond

    def _blocks(self, tiling: WgmmaTile | WgmmaTiles) -> tuple[Any, Any]:
        """Blocks side by side on a multiprocessor, and how often they are replaced."""
        tiles = self.batch * -(-self.rows // tiling.rows) * -(-self.columns // tiling.columns)
        by_shared = SHARED // (self.shared(tiling) + 1024)
        by_registers = FILE // (tiling.threads * self.registers(tiling))
        resident = batch.minimum(by_shared, by_registers, self.machine.threads_per_sm // tiling.threads)
        resident = batch.maximum(1, resident)
        queue = -(-tiles * tiling.split * tiling.cluster // self.machine.sms)
        once = batch.per_distinct(lambda n: gemm_cost.concurrent_clusters(n, self.machine.sms), tiling.cluster)
        waves = batch.where(tiling.cluster == 1, -(-queue // resident), batch.ceil(tiles / (resident * once)))
        return batch.minimum(resident, queue), waves

    def time(self, tiling: WgmmaTile | WgmmaTiles) -> TimeTerm:
        """Cycles of a launch, and of the second one where terms are split, by their terms; of one or of a batch."""
        if tiling.rounded and not self.short:
            beside, waves = self._blocks(tiling)
            return cost_tf32.time(self, tiling, beside, waves, self.rates)
        return gemm_cost.group_time(self, tiling, self.shared(tiling), before=self.before)

    def cycles(self, tiling: WgmmaTile | WgmmaTiles) -> Any:
        """Estimated cycles of a launch, and of the second one where terms are split."""
        return self.time(tiling).value


def _fits(side: GemmOperand, size: int) -> bool:
    """Whether a tile can be copied in whole pieces of 16 bytes (float32 across terms: in squares)."""
    if side.width * side.item != 16:
        return False
    return side.along_terms or (size % 32 == 0 and not side.guards)
