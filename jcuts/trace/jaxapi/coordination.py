"""Key-value store of JAX's coordination service (`jax.distributed.initialize`), through which processes exchange bytes
without a device.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed as _distributed

DEADLINE = "DEADLINE_EXCEEDED"
"""How the service's client says that a key was not set in time."""


class CoordinationStore:
    """The service's keys.  Any process may write one, once; who reads waits until it is there."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        """Sets a key that is not set yet."""
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value of a key, waited for; None where it is not there after so many seconds."""
        try:
            return self._client.blocking_key_value_get_bytes(key, int(seconds * 1000))
        except Exception as error:  # the client's own error type is private and has changed its name
            if DEADLINE in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Frees a key."""
        self._client.key_value_delete(key)


def coordination_store() -> CoordinationStore | None:
    """The store of this job, or None where ``jax.distributed`` was not initialised."""
    client = _distributed.global_state.client
    return None if client is None else CoordinationStore(client)
