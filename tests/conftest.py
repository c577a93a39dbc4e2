"""Environment, signals, order, hypothesis profiles and compiled kernels for all tests."""

from __future__ import annotations

import gc
import math
import os
import signal
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: tests share the machine's cores with each other and with the processes they start, and
# idle threads that spin for work slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup, and in the background of a script, they are ignored, and so they are by all processes that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the load of the machine. Examples are deterministic, so that a test fails only
# because of a change; `make explore` draws new ones, and more of them.
settings.register_profile(
    "chameleon",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
    max_examples=40,
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chameleon")


_LONGEST: Final = (
    "tests/deploy/test_slurm_cluster.py",
    "tests/test_standby.py",
    "tests/runtime/test_joins.py",
    "tests/runtime/test_live_repartition.py",
    "tests/runtime/test_hangs.py",
    "tests/launch/ray/",  # by then Slurm's daemons, which need processors too, have ended
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, or one process would be in them when the others have nothing left."""
    items.sort(key=lambda item: [not item.nodeid.startswith(each) for each in _LONGEST])


def pytest_collection_finish() -> None:
    """Spare all garbage collections the modules that are loaded now, most of their time."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile kernels, once for this installation, before any test or process that it starts is timed."""
    from chameleon_ft.recovery import warm_up

    warm_up()


@pytest.fixture
def attentive_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a coordinator on a busy machine not count as stalled: then it would take back a worker that was cut off."""
    from chameleon_ft.control import state_machine

    monkeypatch.setattr(state_machine, "_STALL_S", math.inf)
