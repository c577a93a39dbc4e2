"""Environment, signals, order, hypothesis profiles and compiled kernels for all tests."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Generator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.backends import use_backend

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="gloo", choices=["gloo", "pretended-nccl"], help="backend of real runs")


def pytest_configure(config: pytest.Config) -> None:
    """Let all real runs use a backend, also those of processes that tests start."""
    use_backend(config.getoption("--backend"))


_LONGEST: Final = (
    "tests/launch/test_slurm_cluster.py",
    "tests/test_standby.py",
    "tests/worker/test_joins.py",
    "tests/worker/test_live_repartition.py",
    "tests/worker/test_hangs.py",
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


_AGAIN_S: Final = 20.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Interrupt a test again and again after its time-out: what it interrupts may wait once more while it cleans up."""
    is_set = yield
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_S)
    return is_set


class _EachTestOnce(LoadFileScheduling):  # type: ignore[misc]
    """Does not repeat the test that ended its process, as the base class does until no process may be replaced."""

    def remove_node(self, node: object) -> str | None:
        for tests in self.assigned_work[node].values():
            for test, is_complete in tests.items():
                if not is_complete:
                    tests[test] = True
                    super().remove_node(node)
                    return str(test)
        super().remove_node(node)
        return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _EachTestOnce | None:
    """Return the scheduler for `--dist loadfile`."""
    return _EachTestOnce(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def attentive_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a coordinator on a busy machine not count as stalled: then it would take back a worker that was cut off."""
    from chameleon_ft.coordinator import state_machine

    monkeypatch.setattr(state_machine, "_STALL_S", math.inf)
