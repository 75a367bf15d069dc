"""Options of ``jcuts.optimize`` as a frozen, hashable record (a parameter of the JAX primitive), and `Variant`.

A variant is one version of a function: which rewrites it has, which regions become kernels, whether calls are chained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from jcuts.base.errors import UsageError

MODES = ("no_fusion", "fusion", "mixed")
TUNE = ("auto", "cached", "off")
ONLINE = "online"
SERVE = "serve"
BETWEEN_CALLS = (ONLINE, SERVE)
"""Calls begin with XLA's program, and tuning goes on beside them."""
COMPLETE = "complete"
ACCURACIES = ("exact", "vendor")
SEARCHED = "searched"
CLEAR = "clear"
ATTENTION = "attention"
LOOP_BODIES = "loops"
UNBROKEN = "unbroken"
BEYOND_SUMS = (CLEAR, UNBROKEN)
"""Regions of variants that count on what the measured sums of their kernels do not show: borders, launches."""
REGIONS = ("all", "anchored", "absorbing", ATTENTION, "none", "every", SEARCHED, CLEAR, LOOP_BODIES, UNBROKEN)
PLAIN = "plain"
SINGLE = "single"


@dataclass(frozen=True)
class Variant:
    """One way to plan a whole function (a program variant); the end-to-end benchmark chooses among them by measurement.

    Attributes:
        rewrites: rules of `rewrite.registry` that are applied first.
        regions: which subsets may become kernels: ``all``; ``anchored``, those with a reduction, window or convolution
            (element-wise operations stay with XLA, which fuses them into what surrounds them); ``absorbing``, the same
            without dense products, whose tails the kernels that read them take over (`fusion.move_epilogue`);
            ``attention``, attentions and their backward passes alone; ``none``; ``every`` (CPUs), those too whose
            kernels lost to XLA by little, or have little work; ``searched`` (GPUs; CPUs always search), what the
            partition search makes of ``all`` by measured times; ``clear`` (GPUs), those of ``all`` whose kernels
            gain clearly by measured times; ``loops`` (CPUs), ``all`` with kernels for whatever a scan's body does, so
            that the scan is one call (`xla.chains.loop`); or ``unbroken`` (GPUs), ``all`` with kernels for element-wise
            operations that stand between two kernels of a chain (`fusion.chain_gaps`).
        chained: whether kernels that can follow each other are one call (`xla.chains`); changes nothing else.
    """

    rewrites: tuple[str, ...] = ()
    regions: str = "all"
    chained: bool = True

    def __post_init__(self) -> None:
        if self.regions not in REGIONS:
            raise UsageError(f"regions={self.regions!r} is unknown: choose one of {REGIONS}", regions=self.regions)

    def __str__(self) -> str:
        """``scales+dots/anchored``, ``scales/all/single``; '' for the plain form. Inverse of `parse`."""
        rewrites = "+".join(self.rewrites)
        if self.chained and self.regions == "all":
            return rewrites
        return f"{rewrites or PLAIN}/{self.regions}" + ("" if self.chained else f"/{SINGLE}")

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The form of a text.

        Raises: UsageError: no such regions, or more behind them than whether kernels are single calls.
        """
        rewrites, _, rest = text.partition("/")
        regions, _, calls = rest.partition("/")
        if calls not in ("", SINGLE):
            raise UsageError(f"form {text!r} is unknown: only {SINGLE!r} may follow its regions", form=text)
        return cls(() if rewrites in ("", PLAIN) else tuple(rewrites.split("+")), regions or "all", calls != SINGLE)

    @classmethod
    def single(cls, form: Variant | None) -> Variant:
        """A form with every kernel as a call of its own."""
        return replace(form or cls(), chained=False)

    @classmethod
    def tuned(cls, form: Variant | None) -> Variant | None:
        """The form that has the same kernels in chains, None for the plain one."""
        return None if form in (None, cls.single(None)) else replace(form, chained=True)


@dataclass(frozen=True)
class Settings:
    """Options of one ``optimize`` call.

    Attributes:
        mode: ``no_fusion`` (one kernel per operation), ``fusion`` (jcuts kernels wherever there is one), or
            ``mixed`` (jcuts kernels and XLA compete by measurement; the default).
        tune: ``auto`` measures at a concrete top-level call, ``online`` between calls that run XLA's program,
            ``serve`` likewise, where no call waits for a stored decision either, ``cached`` only reads earlier choices,
            ``off`` uses the estimator alone.
        tune_seconds: wall time that tuning may take at a first call [s], ``inf`` for no limit; None:
            ``JCUTS_TUNE_SECONDS``.  No part of ``repr``, and so of no key: it changes no program.
        tolerance: allowed error as a multiple of XLA's own error against float64 (2.0 by default).
        workspace_limit: bytes per convolution (WR), or None.
        total_workspace: bytes per network (WD), or None.
        convolution_accuracy: which algorithms count as float32 where a limit is set: ``exact`` ones, or whatever the
            vendor's library computes in float32 (``vendor``).
        strict: raise ``UnsupportedError`` instead of leaving an equation to XLA.
        chunk_logits: whether logits of a softmax loss are computed in chunks of tokens, to save memory; None: where
            they would take much of a device's memory, and where that wins a race (`pipeline.chunk_logits`).
        donates: whether arguments are donated: kernels may overwrite those that results take the place of.
        require: ``complete`` raises an error where something was not measured, and measures nothing.  No part of
            ``repr``, and so of no key.
        form: the program variant; set by the end-to-end benchmark, not by users; None is the plain variant.
    """

    mode: str = "mixed"
    tune: str = "auto"
    tolerance: float = 2.0
    workspace_limit: int | None = None
    total_workspace: int | None = None
    convolution_accuracy: str = "exact"
    strict: bool = False
    chunk_logits: bool | None = None
    donates: bool = False
    form: Variant | None = None
    tune_seconds: float | None = field(default=None, repr=False)
    require: str | None = field(default=None, repr=False)

    @property
    def measures(self) -> bool:
        """Whether a first call measures what is not known."""
        return self.tune == "auto" and self.require is None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode={self.mode!r} is unknown: choose one of {MODES}", mode=self.mode)
        if self.tune not in (*TUNE, *BETWEEN_CALLS):
            raise UsageError(f"tune={self.tune!r} is unknown: choose one of {(*TUNE, *BETWEEN_CALLS)}", tune=self.tune)
        if self.tune in BETWEEN_CALLS and self.mode != "mixed":
            raise UsageError(
                f"tune={self.tune!r} starts with XLA's program, which mode={self.mode!r} leaves out: use mode='mixed'",
                mode=self.mode,
            )
        if self.tune_seconds is not None and not _is_duration(self.tune_seconds):
            raise UsageError(
                f"tune_seconds={self.tune_seconds!r} must be a number of seconds >= 0, or None (JCUTS_TUNE_SECONDS)",
                tune_seconds=self.tune_seconds,
            )
        if self.require not in (None, COMPLETE):
            raise UsageError(f"require={self.require!r} is unknown: {COMPLETE!r}, or None", require=self.require)
        if self.require is not None and self.tune not in ("auto", "cached"):
            raise UsageError(
                f"require={self.require!r} follows what was measured, which tune={self.tune!r} does not: use "
                "tune='auto' or 'cached'",
                tune=self.tune,
            )
        if not (_is_duration(self.tolerance) and 0 < self.tolerance < math.inf):
            raise UsageError(f"tolerance={self.tolerance!r} must be a positive finite number", tolerance=self.tolerance)
        if self.convolution_accuracy not in ACCURACIES:
            raise UsageError(
                f"convolution_accuracy={self.convolution_accuracy!r} is unknown: choose one of {ACCURACIES}",
                convolution_accuracy=self.convolution_accuracy,
            )
        if not isinstance(self.strict, bool):
            raise UsageError(f"strict={self.strict!r} must be True or False", strict=self.strict)
        if self.chunk_logits not in (None, True, False):
            raise UsageError(
                f"chunk_logits={self.chunk_logits!r} must be True, False or None", chunk_logits=self.chunk_logits
            )
        for name in ("workspace_limit", "total_workspace"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise UsageError(f"{name}={value!r} must be a number of bytes >= 0, or None", **{name: value})


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0  # not NaN
