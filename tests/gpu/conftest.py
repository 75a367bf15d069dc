"""What every test on a GPU shares: it is skipped where jcuts cannot use one."""

from __future__ import annotations

import pytest

from jcuts.xla import devices as xla_devices


@pytest.fixture(autouse=True, scope="module")
def usable():
    why = xla_devices.unusable()
    if why:
        pytest.skip(why)
