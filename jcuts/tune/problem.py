"""A tuning problem as plain data (JSON): one region, with everything to verify and time its candidates in another
process.

The worker reads problems from a file and knows nothing else of the user's program.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.base import keys
from jcuts.base.errors import UsageError
from jcuts.kernel_ir.program import Program

FORMAT = 1
MORE = tuple(map("".join, itertools.product(("", " finite"), ("", " divisor"), ("", " tf32"))))
RECIPES = (*(kind + more for kind in ("normal", "positive") for more in MORE), "bool", "integers", "given")
CANDIDATE_KINDS = ("program", "object", "stablehlo")
_GROUPED = re.compile(r"feature_group_count=(?!1\b)\d")
_INTEGERS = re.compile(r"integers (-?\d+)\.\.(-?\d+)")
_OVER = re.compile(r" over ([1-9]\d{0,5})(?= |$)")


@dataclass(frozen=True)
class Input:
    """One operand of the region, and the recipe for its test values.

    Attributes:
        shape: extents.
        dtype: NumPy/ml_dtypes name.
        recipe: ``normal`` (standard normal), ``positive`` (|normal| + 0.1), either with any of `` over N`` (divided by
            it), `` finite`` (never NaN or infinite), `` divisor`` (nothing between 0 and the numbers whose quotients
            overflow) and `` tf32`` (cut to TF32 numbers) behind it, in this order, ``integers lo..hi`` (both ends
            included),
            ``bool``, or ``given``: the values in the file ``npy``, used unchanged in every check (indices, lengths and
            loop conditions: random ones may not terminate).
        npy: path of the .npy file of a ``given`` input; not part of the problem's identity.
    """

    shape: tuple[int, ...]
    dtype: str
    recipe: str = "normal"
    npy: str | None = None

    def __post_init__(self) -> None:
        if _OVER.sub("", self.recipe, 1) not in RECIPES and not _INTEGERS.fullmatch(self.recipe):
            raise UsageError(
                f"input recipe {self.recipe!r} is unknown: use one of {RECIPES} or 'integers lo..hi'",
                recipe=self.recipe,
            )
        if self.recipe == "given" and not self.npy:
            raise UsageError("an input with recipe 'given' needs the path of its .npy file", recipe=self.recipe)

    @property
    def divisor(self) -> int:
        """By what the values are divided."""
        found = _OVER.search(self.recipe)
        return int(found[1]) if found else 1

    def integer_range(self) -> tuple[int, int] | None:
        """(lo, hi), both included, of an ``integers lo..hi`` recipe; None if the whole dtype may occur."""
        found = _INTEGERS.fullmatch(self.recipe)
        return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Output:
    """One result of the region.

    Attributes:
        shape, dtype: as of the XLA subset.
        reduction: number of terms that are summed into one element along the subset's longest chain (1: elementwise);
            sets the tolerance floor of 4 ulp * sqrt(reduction).
        exact: bit-equal to XLA wherever the float64 margin exceeds rounding (integers, booleans, argmax, ...).
    """

    shape: tuple[int, ...]
    dtype: str
    reduction: int = 1
    exact: bool = False

    def __post_init__(self) -> None:
        if self.reduction < 1:
            raise UsageError(f"reduction={self.reduction} must be at least 1", reduction=self.reduction)


@dataclass(frozen=True)
class Candidate:
    """One implementation of the region: a scheduled kernel program, or XLA's code.

    Attributes:
        kind: ``program`` (kernel program as JSON text, compiled by codegen), ``object`` (ready object code, see
            `object_payload`) or ``stablehlo`` (a serialised export with compiler options, see `stablehlo_payload`).
        payload: text of that kind.
        label: short name, unique in its problem, shown to people.
        pul: estimator's upper bound on the share of peak; candidates rank by it when nothing is measured.
        bound_seconds: estimator's lower bound on the time [s].
    """

    kind: str
    payload: str = field(repr=False)
    label: str
    pul: float = 0.0
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in CANDIDATE_KINDS:
            raise UsageError(f"candidate kind {self.kind!r} is unknown: use one of {CANDIDATE_KINDS}", kind=self.kind)

    @functools.cached_property
    def digest(self) -> str:
        """Content hash of kind and payload."""
        return keys.candidate(self.kind, self.payload)


@dataclass(frozen=True)
class Problem:
    """One region to be tuned.

    Attributes:
        identity: canonical text of what is computed (the subset's jaxpr with its shapes and constants' hashes).
        inputs, outputs: operands and results, in order.
        candidates: what competes with the library, best estimate first.
        space: text that determines the candidates (settings, architecture); '' means that the candidates' own
            digests stand for it.  With it the digest is known, and the database can be asked, before any candidate
            or export has been made.
        tolerance: allowed error as a multiple of XLA's own.
        library: serialised `jax.export` of the subset, the library candidate (see `tune.baseline.xla_export`).
        reference: serialised export of its float64 form; takes (noise seed, three amplitudes, *widened inputs).
        perturb: whether the reference must also be run with simulated rounding, because the subset turns floats into
            discrete values (comparisons, argmax, casts) or exponentiates sums.
        unsure: whether noise in its float64 operations, or rounding of its products' operands, must tell how far the
            reference is to be trusted.
        rounds: whether its products may round their operands to TF32 (`widen.rounds_operands`).
        degree: how often a value may be multiplied with others on its way through the subset; bounds the magnitudes of
            ``huge`` inputs so that intermediate products do not overflow (where they would, XLA's own answer depends
            on how it happened to rewrite the products).
        name: for people.
        device: the GPU that it is tuned for, '' for this CPU.
        expected: how many candidates there will be at most, where they are not made yet; for progress alone.
        text: the subset's program as text, by which problems that differ in one size are told
            (`tune.baseline.interpolate`); '' for one that is measured on its own.
        parts: digests of problems that are the same work in several programs, if there are any.
        schedules: versions of the kernel families that are asked for candidates (`keys.schedules`), which a choice
            records; () where they are not known.
        wanted: whether a kernel is wanted even where XLA's code alone is faster; no part of the key.
    """

    identity: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    candidates: tuple[Candidate, ...] = ()
    space: str = ""
    tolerance: float = 2.0
    library: bytes | None = field(default=None, repr=False)
    reference: bytes | None = field(default=None, repr=False)
    perturb: bool = False
    unsure: bool = False
    rounds: bool = False
    degree: int = 1
    name: str = ""
    device: str = ""
    expected: int = 0
    text: str = field(default="", repr=False)
    parts: tuple[str, ...] = ()
    schedules: tuple[tuple[str, str], ...] = ()
    wanted: bool = False

    def mode(self, mode: str) -> str:
        """The mode by which a kernel is chosen, where it is ``mode`` for others: ``fusion`` if one is wanted."""
        return "fusion" if self.wanted and mode == "mixed" else mode

    def __post_init__(self) -> None:
        labels = [c.label for c in self.candidates]
        if len(set(labels)) != len(labels) or "xla" in labels:
            raise UsageError(f"candidate labels {labels} must be distinct and none may be 'xla'", labels=labels)
        if not self.outputs:
            raise UsageError("a tuning problem needs at least one output", name=self.name)

    @functools.cached_property
    def digest(self) -> str:
        """Key of the problem: what is computed, on what, from which candidates, to which tolerance."""
        return keys.problem(
            device=self.device,
            identity=self.identity,
            inputs=[[list(i.shape), i.dtype, i.recipe] for i in self.inputs],
            outputs=[[list(o.shape), o.dtype, o.reduction, o.exact] for o in self.outputs],
            space=self.space or [c.digest for c in self.candidates],
            tolerance=self.tolerance,
        )

    @property
    def has_grouped_convolution(self) -> bool:
        """Whether its text has a convolution of groups, for which cuDNN compiles dozens of kernels to choose from."""
        return _GROUPED.search(self.text) is not None

    @property
    def platform(self) -> str:
        """Where XLA's side of it runs: ``cpu`` or ``cuda``."""
        return "cuda" if self.device else "cpu"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU (`xla.devices.Gpu.identity` names it). Raises UsageError where it is
        not named.
        """
        found = re.search(r" (\d+)\.(\d+) x", self.device)
        if found is None:
            raise UsageError(f"device {self.device!r} does not say its compute capability", device=self.device)
        return int(found[1]), int(found[2])

    def with_exports(
        self, library: bytes, reference: bytes, perturb: bool, unsure: bool = False, rounds: bool = False
    ) -> Problem:
        """The same problem with its library and reference artifacts; the digest does not change."""
        return replace(self, library=library, reference=reference, perturb=perturb, unsure=unsure, rounds=rounds)

    def candidate(self, label: str) -> Candidate:
        """The candidate of that label.

        Raises:
            UsageError: there is none.
        """
        for candidate in self.candidates:
            if candidate.label == label:
                return candidate
        raise UsageError(
            f"problem {self.name or self.digest[:12]} has no candidate {label!r}: it has "
            f"{[c.label for c in self.candidates]}",
            label=label,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; inverse of `from_json`."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            "name": self.name,
            "device": self.device,
            "space": self.space,
            "tolerance": self.tolerance,
            "perturb": self.perturb,
            "unsure": self.unsure,
            "rounds": self.rounds,
            "degree": self.degree,
            "inputs": [
                {"shape": list(i.shape), "dtype": i.dtype, "recipe": i.recipe, "npy": i.npy} for i in self.inputs
            ],
            "outputs": [
                {"shape": list(o.shape), "dtype": o.dtype, "reduction": o.reduction, "exact": o.exact}
                for o in self.outputs
            ],
            "candidates": [
                {
                    "kind": c.kind,
                    "payload": c.payload,
                    "label": c.label,
                    "pul": c.pul,
                    "bound_seconds": c.bound_seconds,
                }
                for c in self.candidates
            ],
            "library": _encode(self.library),
            "reference": _encode(self.reference),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: another format, or fields are missing.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise UsageError(f"tuning problem of format {found!r}, this version reads {FORMAT}", found=found)
        try:
            return cls(
                identity=data["identity"],
                inputs=tuple(Input(tuple(i["shape"]), i["dtype"], i["recipe"], i.get("npy")) for i in data["inputs"]),
                outputs=tuple(
                    Output(tuple(o["shape"]), o["dtype"], o["reduction"], o["exact"]) for o in data["outputs"]
                ),
                candidates=tuple(Candidate(**c) for c in data["candidates"]),
                space=data.get("space", ""),
                tolerance=data["tolerance"],
                library=decode_bytes(data.get("library")),
                reference=decode_bytes(data.get("reference")),
                perturb=bool(data.get("perturb", False)),
                unsure=bool(data.get("unsure", False)),
                rounds=bool(data.get("rounds", False)),
                degree=int(data.get("degree", 1)),
                name=data.get("name", ""),
                device=data.get("device", ""),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(f"tuning problem lacks a field: {error!r}", found=sorted(data)) from None


def label_of(program: Program) -> str:
    """The label of the candidate that a kernel program is: it tells the content."""
    return f"{program.template}-{program.digest[:10]}"


def object_payload(
    object_code: bytes,
    symbol: str,
    *,
    tiles: int,
    scratch_bytes: int,
    inputs: tuple[tuple[tuple[int, ...], str], ...],
    outputs: tuple[tuple[tuple[int, ...], str], ...],
) -> str:
    """Payload of an ``object`` candidate: relocatable object code that follows the kernel ABI, as JSON text."""
    return json.dumps(
        {
            "object_code": _encode(object_code),
            "symbol": symbol,
            "tiles": tiles,
            "scratch_bytes": scratch_bytes,
            "inputs": [[list(shape), dtype] for shape, dtype in inputs],
            "outputs": [[list(shape), dtype] for shape, dtype in outputs],
        }
    )


def stablehlo_payload(artifact: bytes, compiler_options: dict[str, Any] | None = None) -> str:
    """Payload of a ``stablehlo`` candidate: a serialised export and options for `jax.jit(compiler_options=...)`."""
    return json.dumps({"artifact": _encode(artifact), "compiler_options": compiler_options or {}}, sort_keys=True)


def _encode(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(bytes(data)).decode()


def decode_bytes(text: str | None) -> bytes | None:
    """Inverse of the base64 text in payloads; None stays None."""
    return None if text is None else base64.b64decode(text)
