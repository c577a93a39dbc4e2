"""Fault injection: this rank fails in a phase of a step, as a real failure would end it, or becomes slow or wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from chameleon_ft.config import LASTING_KINDS, Failure, FailureKind, FailurePhase
from chameleon_ft.storage.files import FaultLog


class FaultInjector:
    """Fails this rank at given phases and steps, from its configuration or ordered while it runs.

    Args:
        failures: failures of the run's configuration; only those of `worker` count.
        log: records the moment of a failure, so that its detection can be timed.
        disconnect: cuts the control connection.

    Attributes:
        corrupt: flips a bit of the rank's state; called in the thread that calls `at`.
        spoil: makes a gradient not a number; likewise.
    """

    def __init__(
        self, worker: int, failures: Iterable[Failure], *, log: FaultLog, disconnect: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._planned = [failure for failure in failures if failure.worker == worker]
        self._log = log
        self._disconnect = disconnect
        self._lock = threading.Lock()
        self._speed_share = 1.0
        self.link_share = 1.0
        self.corrupt: Callable[[], None] = lambda: None
        self.spoil: Callable[[], None] = lambda: None

    def plan(self, failure: Failure) -> None:
        """Add a failure. Called by the control thread."""
        with self._lock:
            self._planned.append(failure)

    def at(self, phase: str, step: int) -> None:
        """Fail now if a failure is planned for this phase of `step` or of an earlier one."""
        with self._lock:
            due = [failure for failure in self._planned if failure.phase == phase and failure.step <= step]
            for failure in due:
                self._planned.remove(failure)
        for failure in due:
            if failure.factor is not None:
                self.slow(failure.kind, failure.factor)
            elif failure.kind == "corrupt":
                self.corrupt()
            elif failure.kind == "nan":
                self.spoil()
            else:
                self.fail(failure.kind, phase=failure.phase, step=step)

    def fail(self, kind: FailureKind, *, phase: FailurePhase | None, step: int | None) -> None:
        """Fail at once."""
        with contextlib.suppress(OSError):
            self._log.append(worker=self._worker, kind=kind, phase=phase, step=step)
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                # Another signal would stop this thread some time later, when another one has received it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "disconnect":
                self._disconnect()

    def slow(self, kind: FailureKind, factor: float) -> None:
        """Compute at this share of the usual speed from now on, or have this share of the links' bandwidth."""
        if kind == "slow":
            self._speed_share = factor
        else:
            self.link_share = factor

    def slow_down(self, start_s: float) -> None:
        """Return when an operation, begun at `start_s` of `time.perf_counter`, would end at the injected speed."""
        if self._speed_share < 1:
            time.sleep((time.perf_counter() - start_s) * (1 / self._speed_share - 1))


def failures_of_incarnation(failures: Iterable[Failure], worker: int, incarnation: int) -> list[Failure]:
    """Return the failures of one incarnation, counted from 1: the n-th has the n-th one that ends it.

    Where it becomes slow, or its state is changed, belongs to the incarnation that the next failure ends.
    """
    by_incarnation: list[list[Failure]] = [[]]
    for failure in failures:
        if failure.worker == worker:
            by_incarnation[-1].append(failure)
            if failure.kind not in LASTING_KINDS:
                by_incarnation.append([])
    return by_incarnation[incarnation - 1] if incarnation <= len(by_incarnation) else []


def flip_random_bit(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Flip one bit of one tensor of some layer's state, all tensors being equally likely; describe what was flipped.

    `states`: layer -> its state, by keys as those of `HeldLayers.state_of`.
    """
    tensors = [
        (layer, key, value)
        for layer, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.numel() and value.is_contiguous()
    ]
    layer, key, tensor = random.choice(tensors)
    # Not a change that autograd sees: it would refuse the backward.
    content = tensor.data.view(-1).view(torch.uint8)
    byte, bit = random.randrange(content.numel()), random.randrange(8)
    content[byte] ^= 1 << bit
    return f"bit {bit} of byte {byte} of {key} of layer {layer}"
