"""Ranks of which one fails before it connects; without imports, so that forked ranks do not wait for those of tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from chameleon_ft.protocol.parts import Member
from chameleon_ft.worker.rank import spawned_rank_main

WORKER = 2
"""The worker whose first process fails."""


def dies(*lifelines: int, **arguments: Any) -> None:
    """Run a rank; the first process of a worker dies before it connects."""
    _run_rank(partial(os.kill, os.getpid(), signal.SIGKILL), *lifelines, **arguments)


def hangs(*lifelines: int, **arguments: Any) -> None:
    """Run a rank; the first process of a worker hangs before it connects."""
    _run_rank(signal.pause, *lifelines, **arguments)


def _run_rank(fail: Callable[[], object], *lifelines: int, member: Member, **arguments: Any) -> None:
    if member == (WORKER, 1):
        fail()
    spawned_rank_main(*lifelines, member=member, **arguments)
