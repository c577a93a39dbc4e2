"""Runs that last until a history of events has happened, with failures that other events bring about."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chameleon_ft.config import RunConfig
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import request
from chameleon_ft.protocol.messages import Inject
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import View
from tests.harness import Ended, in_thread, train_here

# A run in which nothing has happened for so many steps, and so many seconds, is not going to go on with its history.
_MAX_QUIET_STEPS = 200
_MAX_QUIET_S = 20.0


@dataclass
class StoppingView(View):
    """Ends the run like Ctrl-C, `more_steps` steps after its condition holds; shows nothing.

    A run in which nothing happens any more before that is ended, too.

    Attributes:
        is_over: evaluated after every step.
        injected: failures by the name and the number, from 1, of the event that brings each about.
    """

    run: RunDirectory
    is_over: Callable[[Ended], object]
    more_steps: int = 8
    injected: Mapping[tuple[str, int], Inject] = field(default_factory=dict)
    _events: Counter[str] = field(default_factory=Counter)
    _quiet_since: tuple[int, float] = field(default_factory=lambda: (0, time.monotonic()))
    _num_steps: int = 0
    _num_events: int = 0

    def show(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._step()
        else:
            self._events[record.name] += 1
            if (failure := self.injected.get((record.name, self._events[record.name]))) is not None:
                in_thread(partial(request, self.run, failure))()

    def _step(self) -> None:
        ended = Ended(0, self.run)
        self._num_steps += 1
        if (events := len(ended.run.events())) != self._num_events:
            self._num_events, self._quiet_since = events, (self._num_steps, time.monotonic())
        steps, start_s = self._quiet_since
        if self.is_over(ended):
            self.more_steps -= 1
        elif self._num_steps - steps > _MAX_QUIET_STEPS and time.monotonic() - start_s > _MAX_QUIET_S:
            self.more_steps = 0
        if self.more_steps == 0:
            self.more_steps = -1  # a second one would end the run without a checkpoint
            os.kill(os.getpid(), signal.SIGINT)


def train_until(
    config: RunConfig,
    path: Path,
    is_over: Callable[[Ended], object],
    *,
    injected: Mapping[tuple[str, int], Inject] | None = None,
    view: StoppingView | None = None,
) -> Ended:
    """Train until something has come true, and some steps more; fail with what has happened if it cannot come true."""
    view = view or StoppingView(RunDirectory(path), is_over, injected=injected or {})
    ended = train_here(config, path, view=view)
    assert is_over(ended), [(event.name, event.message) for event in ended.run.events()]
    return ended
