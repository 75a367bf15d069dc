"""The one error tree of jcuts.

Every error keeps the values it speaks of as attributes; its sentence says what was wrong, with which
numbers, and what to do.  User input is never checked with ``assert``.
"""

from __future__ import annotations

from dataclasses import dataclass


class JcutsError(Exception):
    """Root of every error that jcuts raises on purpose.

    Keyword arguments become attributes, so that a caller (or a parent process) can read the numbers:

    >>> error = JcutsError("too large", limit=3)
    >>> error.limit
    3
    """

    def __init__(self, message: str, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.values = values
        for name, value in values.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.values)


def summary(error: BaseException) -> str:
    """Kind and first line of an error, for a line of a report.

    >>> summary(ValueError("too large\\nby far")), summary(KeyError())
    ('ValueError: too large', 'KeyError: ')
    """
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _rebuild(kind: type[JcutsError], message: str, values: dict[str, object]) -> JcutsError:
    return kind(message, **values)


class UsageError(JcutsError, ValueError):
    """The caller passed something that cannot be right (unknown mode, negative limit, ...)."""


class NotJaxError(JcutsError, TypeError):
    """The function cannot be traced by JAX."""


class UnsupportedError(JcutsError):
    """``strict=True`` and an equation has no jcuts rule: names the primitive, the line and the reason."""


class IRError(JcutsError):
    """A stage of the compiler produced an ill-formed program (a bug of jcuts: please report)."""


class SchemaError(IRError, ValueError):
    """Stored data (a kernel program in a database or an export) does not have the form that this version reads."""


class ModelError(JcutsError, ValueError):
    """An estimate was asked for with impossible counts, or an architecture file is malformed."""


class CandidateRejected(JcutsError):
    """One kernel candidate is out: too inaccurate, too large, crashed, hung.  The only error the tuner catches."""


class CompileRejected(CandidateRejected):
    """The candidate does not compile, spills, or needs more than the device has."""


class AccuracyRejected(CandidateRejected):
    """The candidate's error against float64 exceeds what is allowed."""


class WorkerFailed(CandidateRejected):
    """The measuring process died, hung, or answered nonsense while it ran this candidate."""


class CacheError(JcutsError):
    """The tuning database or the object cache cannot be used (corrupt, foreign version, read-only, full)."""


class IncompleteTuning(JcutsError):
    """``require="complete"``, and something that a call needs was not measured; ``missing`` lists it."""


class NativeError(JcutsError):
    """The native library is missing, was built for another FFI version, or refused a call."""


class ArtifactError(JcutsError):
    """A file is no artefact that this version reads: damaged, cut short, foreign, of another format, wrongly signed."""


class ArtifactMismatch(ArtifactError):
    """An artefact was made for another device, driver or version; ``differences`` names each one."""


class UnknownSignature(ArtifactError, TypeError):
    """A call has structure, shapes or dtypes that the artefact was not saved for; the sentence lists those it has."""


@dataclass(frozen=True)
class Refusal:
    """Why a rule declined.  Returned, never raised: a refusal is a normal answer and is shown by ``explain``."""

    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}"
