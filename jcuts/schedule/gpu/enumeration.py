"""Which kernel families are asked for the schedules of a program, and how those of several compete.

`RULES` are asked in order; the first that matches and has schedules decides.  Most rules take the schedules of their
families (`schedule.gpu.families`) as they are; ``combine`` weighs those of families that differ in what limits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import ROWS
from jcuts.schedule import fit
from jcuts.schedule.gpu import contraction
from jcuts.schedule.gpu import tensor_core_times as times
from jcuts.schedule.gpu.conv import few_channels
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.machine import TAPS, Candidate, GpuMachine, rescale_to
from jcuts.schedule.gpu.problem import GpuProblem
from jcuts.schedule.gpu.skinny_gemm import schedules as skinny_schedules

SHORT_SUMS = ("thread_tile", "sliding_window")
"""Families whose threads take all values of an output: tried beside tensor cores where there are few."""
MATVEC = ("row_reduction", "column_reduction", "thread_tile", "gemv")
"""Families of matrix-vector products without tensor cores."""
FEW_ROWS = ("skinny_gemm", "gemv")
"""Families of products of 2 to 16 rows that memory bounds."""
_GEMV = fit.coefficients("gpu/gemv", "ranking")
_SKINNY = fit.coefficients("gpu/skinny_gemm", "ranking")


@dataclass(frozen=True)
class EnumerationRule:
    """Programs that the same families compete for.

    Attributes:
        name: for messages and tests.
        families: whose schedules there may be.
        match: whether a program is one of the rule's, given that no earlier rule decided.
        combine: schedules with scores; None: those of all families, as they are.
        is_final: whether no later rule is asked where this one has no schedules either.
        first: schedules of which there is one wherever there are any, made one after the other; None: of the families.
    """

    name: str
    families: tuple[str, ...]
    match: Callable[[GpuProblem], bool]
    combine: Callable[[GpuProblem], Iterable[Candidate]] | None = None
    is_final: bool = True
    first: Callable[[GpuProblem], Iterable[Candidate]] | None = None

    def schedules(self, problem: GpuProblem) -> list[Candidate]:
        """All schedules of a program of the rule."""
        return list(self._of_families(problem) if self.combine is None else self.combine(problem))

    def has_any(self, problem: GpuProblem) -> bool:
        """Whether a program of the rule has a schedule, at the cost of one."""
        return any(True for _ in (self.first or self.combine or self._of_families)(problem))

    def _of_families(self, problem: GpuProblem) -> Iterator[Candidate]:
        return (candidate for name in self.families for candidate in FAMILIES[name].schedules_of(problem))


def enumerate_schedules(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """All schedules that the families propose for a program, with scores."""
    problem = GpuProblem(program, machine)
    for rule in RULES:
        if not rule.match(problem):
            continue
        found = rule.schedules(problem)
        yield from found
        if found or rule.is_final:
            return


def has_schedules(program: Program, machine: GpuMachine) -> bool:
    """Whether `enumerate_schedules` has any for a program."""
    problem = GpuProblem(program, machine)
    for rule in RULES:
        if rule.match(problem):
            found = rule.has_any(problem)
            if found or rule.is_final:
                return found
    return False


# -- rules that weigh families against each other ---------------------------------------------------------------------
def _matvec(problem: GpuProblem) -> Iterable[Candidate]:
    if problem.gemm is None:
        return ()
    sums = list(contraction.matvec_reductions(problem.gemm, problem.machine))
    return [*sums, *_gemv(problem, sums)]


def _gemv(problem: GpuProblem, others: Sequence[Candidate]) -> list[Candidate]:
    """Split-K GEMV schedules, rescaled to stand before the best of the others."""
    found = rescale_to(list(FAMILIES["gemv"].schedules_of(problem)), others)
    return [(made, _GEMV.score_over_gemm * score) for made, score in found]


def _few_rows(problem: GpuProblem, others: Sequence[Candidate]) -> list[Candidate]:
    """Schedules of 2 to 16 rows, whose scores are shares of the memory's bandwidth, rescaled to stand before others.

    Each family for itself: their models differ by more than their measured times, and none may crowd the other out.
    """
    families = [made for name in FEW_ROWS if (made := list(FAMILIES[name].schedules_of(problem)))]
    best = [made[: skinny_schedules.MOST // len(families)] for made in families]
    found = [candidate for made in best for candidate in rescale_to(made, others)]
    return [(made, _SKINNY.score_over_gemm * score) for made, score in found]


def _is_exact_gemm(problem: GpuProblem) -> bool:
    made = problem.exact_gemm if problem.machine.multiplies else None
    return made is not None and made.phases[0].ranges()[ROWS] > 1


def _exact_gemm(problem: GpuProblem) -> list[Candidate]:
    found = [c for name in ("simt_gemm", "mma_f64") for c in FAMILIES[name].schedules_of(problem)]
    if found and problem.length <= TAPS:
        found += contraction.simt_reductions(problem.program, problem.machine, found[0][1])
    return found


def _tensor_core_gemm(problem: GpuProblem) -> list[Candidate]:
    made, machine = problem.gemm, problem.machine
    if made is None or not (found := list(contraction.contraction_schedules(made, machine))):
        return []
    if problem.is_matvec:  # bound by memory: plain sums may be as fast, and are exact
        found = found[: gemm_mma.MOST // 2]
        sums = list(contraction.matvec_reductions(made, machine))
        found += [(p, score / sums[0][1] * found[0][1]) for p, score in sums]
        found += _gemv(problem, found)
        return found
    found += _few_rows(problem, found)
    if problem.length <= TAPS:  # few terms: a thread may take them all, without rounding them
        found += contraction.simt_reductions(problem.program, machine, found[0][1])
    return found


def _column_sums(problem: GpuProblem) -> list[Candidate]:
    """Schedules of the GEMM whose epilogue reduces columns; scores count the second launch."""
    if problem.gemm is None:
        return []
    found = []
    for made, score in contraction.contraction_schedules(problem.gemm, problem.machine):
        time = family_of(made).time
        assert time is not None
        whole = time(made, problem.machine).root.value
        more = times.column_sum_cycles(made, problem.machine)
        found.append((made, score * (whole - more) / whole))
    return found


def _contractions(problem: GpuProblem) -> Iterable[Candidate]:
    return () if problem.gemm is None else contraction.contraction_schedules(problem.gemm, problem.machine)


def _few_channels(problem: GpuProblem) -> list[Candidate]:
    found = list(FAMILIES["few_channels_conv"].schedules_of(problem))
    if found and problem.length <= TAPS:
        best = max(score for _, score in found)
        found += contraction.simt_reductions(problem.program, problem.machine, best)
    return found


RULES: tuple[EnumerationRule, ...] = (
    EnumerationRule("scan", ("scan_rows", "scan_columns"), lambda p: p.is_scan),
    EnumerationRule("recurrence", ("recurrence",), lambda p: p.is_recurrence),
    EnumerationRule("attention", ("flash_attention",), lambda p: p.is_attention),
    EnumerationRule("attention backward", ("attention_backward",), lambda p: p.is_attention_backward),
    EnumerationRule("inverted residual", ("inverted_residual",), lambda p: p.is_inverted_residual),
    EnumerationRule("back-to-back GEMM", ("b2b_gemm", "b2b_wgmma"), lambda p: p.is_layer_fusion),
    EnumerationRule(
        "GEMM with column sums",
        ("implicit_gemm", "wgmma", "mma"),
        lambda p: p.has_column_sums and p.machine.multiplies,
        _column_sums,
        first=_contractions,
    ),
    EnumerationRule("rows with column sums", ("row_column_sums",), lambda p: p.is_row_column_sums),
    EnumerationRule("norm of rows", ("row_reduction", "online_softmax"), lambda p: p.is_row_norm),
    EnumerationRule("norm of columns", ("column_softmax", "welford"), lambda p: p.is_column_norm),
    EnumerationRule("map", ("thread_tile", "smem_transpose"), lambda p: p.is_map),
    EnumerationRule(
        "matrix-vector product without tensor cores",
        MATVEC,
        lambda p: not p.machine.multiplies and p.is_matvec,
        _matvec,
    ),
    EnumerationRule(
        "GEMM of more than TF32", ("simt_gemm", "mma_f64", *SHORT_SUMS), _is_exact_gemm, _exact_gemm, is_final=False
    ),
    EnumerationRule(
        "GEMM on tensor cores",
        ("warp_specialized", "implicit_gemm", "wgmma", "mma", "skinny_gemm", *MATVEC, "sliding_window"),
        lambda p: p.machine.multiplies and p.gemm is not None,
        _tensor_core_gemm,
        is_final=False,
        first=_contractions,
    ),
    EnumerationRule(
        "convolution of few channels",
        ("few_channels_conv", *SHORT_SUMS),
        lambda p: p.machine.multiplies and p.is_convolution,
        _few_channels,
        is_final=False,
        first=lambda p: few_channels.first_product(p.program, p.machine),
    ),
    EnumerationRule("reduction of rows", ("row_reduction",), lambda p: p.is_row_reduction),
    EnumerationRule("reduction of columns", ("column_reduction", "thread_tile"), lambda p: p.is_column_reduction),
    EnumerationRule("window", SHORT_SUMS, lambda p: p.is_window),
)
"""In the order in which they are asked."""
