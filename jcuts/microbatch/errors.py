"""Exceptions of micro-batching: no division within the limit, no split of the batch, foreign device, missing times."""

from __future__ import annotations

from jcuts.base.errors import CacheError, JcutsError


class NoDivisionError(JcutsError):
    """No combination of measured sizes adds up to the batch within the limit.

    Attributes:
        limit: [B].
        least: if some limit is large enough, the smallest one [B]; else None.
    """


class NoSplitError(JcutsError):
    """No sizes with known times add up to the batch over these devices."""


class ForeignDeviceError(CacheError):
    """The database knows other devices only: their times say nothing about this one.

    Attributes:
        device: what was asked for.
        known: what there is.
    """


class MissingTimesError(CacheError):
    """The database knows the device, but not this convolution at these batch sizes."""
