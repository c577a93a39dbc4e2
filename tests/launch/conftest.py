"""What all tests of launchers and agents need."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    """Have SIGHUP its usual effect, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
