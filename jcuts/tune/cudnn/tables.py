"""Time tables of a program's convolutions for the micro-batching pass: from the database, or measured now.

Per convolution: every size of ``powerOfTwo``, sizes in between and slices of the outputs that the limit makes worth it
(`microbatch.sampling_plan`), and XLA's own convolution where that competes.  With a policy the sizes are its own, and
slices are theirs; ``undivided`` has none.  The network is stored beside its times, for ``jcuts microbatch analyse``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jcuts.base.errors import JcutsError
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.errors import MissingTimesError
from jcuts.microbatch.network import Network
from jcuts.microbatch.sampling_plan import sizes_between
from jcuts.microbatch.timings import MicroConfig, Table, policy_sizes, usable_sizes
from jcuts.tune.cudnn import measurer as timing
from jcuts.tune.parent.machine_lock import default_patience, holder, measuring_lock
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import LIBRARY

log = logging.getLogger("jcuts.pipeline.microbatch_convs")

Key = tuple[Convolution, int]
"""A convolution and its batch."""
POWERS = "powerOfTwo"
UNDIVIDED = "undivided"


@dataclass(frozen=True)
class DivisionRequest:
    """Parameters of a table request.

    Attributes: platform: 'cpu' or 'cuda'; limit: of one convolution's workspace [B]; accuracy: of
    `settings.ACCURACIES`; library: XLA's own convolutions compete; policy: of `timings.POLICIES`, or None for powers of
    two and what the limit makes worth it.
    """

    platform: str
    limit: int
    accuracy: str
    library: bool
    policy: str | None = None


def tables_of(
    wanted: Mapping[Key, set[str]], asked: DivisionRequest, *, may_measure: bool
) -> tuple[dict[Key, Table | None], bool]:
    """The tables of convolutions, None where nothing is known; and whether another process was measuring.

    Args: wanted: with the precisions that programs ask for.
    Raises: JcutsError, OSError: no database, no device, no disk.
    """
    device = timing.this_device(asked.platform, accuracy=asked.accuracy)
    database = _database(str(timing.database_path()))
    found = {key: _known(database, device, *key) for key in wanted}
    missing = [
        key
        for key, table in found.items()
        if table is None
        or database.missing(device, key[0], _sizes(key, asked), limit=asked.limit)
        or (asked.policy != UNDIVIDED and timing.to_slice(*key, (asked.limit,), sorted(wanted[key]), database, device))
        or (asked.library and not xla_times(table, key[1]) and LIBRARY not in database.remarks(device, *key))
    ]
    if not missing or not may_measure:
        return found, False
    with measuring_lock(patience=default_patience()) as may:
        if not may:
            log.warning("%s is still measuring: convolutions stay with XLA, a later call measures", holder())
            return found, True
        made, postponed = _measured({key: wanted[key] for key in missing}, asked, database, device)
    return {**found, **made}, postponed


def _sizes(key: Key, asked: DivisionRequest) -> tuple[int, ...]:
    """Sizes without which a convolution is measured again."""
    if asked.policy is None:
        return (key[1],)
    return usable_sizes(policy_sizes(asked.policy, key[1]), key[1], key[0].unit)


def remember_network(network: Network) -> None:
    """Stores a network beside the times of its convolutions, once.

    Raises: CacheError if the database cannot be used.
    """
    database = _database(str(timing.database_path()))
    if all(known.name != network.name for known in database.networks()):
        database.record_network(network)


def only_cudnn(table: Table) -> Table:
    """Without XLA's own convolution."""
    return replace(table, micros=tuple(m for m in table.micros if cudnn_call.is_cudnn(m.algorithm)))


def xla_times(table: Table, batch: int) -> list[MicroConfig]:
    """XLA's own convolution of a whole batch."""
    return [m for m in table.micros if m.algorithm == LIBRARY and m.batch == batch]


@functools.lru_cache(maxsize=4)
def _database(path: str) -> Database:
    return Database(path)  # kept: what cannot be written is in memory only


def _known(database: Database, device: Device, convolution: Convolution, batch: int) -> Table | None:
    """The table of a convolution, None if its whole batch was never measured."""
    try:
        if database.missing(device, convolution, (batch,), limit=0):
            return None
        return database.table(device, convolution)
    except MissingTimesError:
        return None


def _measured(
    todo: Mapping[Key, set[str]], asked: DivisionRequest, database: Database, device: Device
) -> tuple[dict[Key, Table | None], bool]:
    """Measures powers of two, and then what the limit makes worth it; or a policy's sizes.

    Returns: tables, None where nothing could be measured; and whether that was for want of memory or the like.
    """
    found: dict[Key, Table | None] = {}
    postponed = False
    with timing.Measurer(device, asked.platform, asked=asked.limit, accuracy=asked.accuracy) as measurer:
        for (convolution, batch), precisions in todo.items():
            try:
                policy = asked.policy or POWERS
                table = timing.measured(convolution, batch, database, measurer, policy=policy, library=asked.library)
                for precision in sorted(precisions) if asked.policy is None else ():
                    for size in sizes_between(only_cudnn(table), batch, asked.limit, precision=precision):
                        timing.measured(convolution, size, database, measurer, policy=UNDIVIDED, library=False)
                if policy != UNDIVIDED:
                    table = timing.measured_in_slices(
                        convolution, batch, (asked.limit,), sorted(precisions), database, measurer
                    )
                found[convolution, batch] = table
            except JcutsError as error:
                log.warning("%s, batch %d, is left to XLA: %s", convolution, batch, error.message)
                found[convolution, batch] = None
                postponed |= error.values.get("reason") in timing.LATER
    return found, postponed
