"""A run that is watched from its directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.files import RunDirectory
from chameleon_ft.observe.live.follower import RunFollower
from chameleon_ft.observe.live.report import RunReport
from chameleon_ft.observe.live.run_state import RunState
from chameleon_ft.observe.recorder import RecordLine


class RunWatcher:
    """Follows the files of a run, and reports its state.

    Attributes:
        run: the directory.
        clock: Unix seconds by which the age of records is counted; None: by the files, whose clock is the records'.
        state: as of the last call of `update`.
        damaged: messages about lines that `update_readable` has left out.
    """

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] | None = None) -> None:
        self.run = run
        self.state = RunState(run)
        self.damaged: list[str] = []
        self._follower = RunFollower(run)
        self._clock = clock

    def update(self) -> list[RecordLine]:
        """Take in the lines that the run has added, and return them. Raises ConfigError if one is damaged."""
        lines = self._follower.new_lines()
        for line in lines:
            self.state.add(line)
        return lines

    def update_readable(self) -> list[RecordLine]:
        """As `update`, but leave out the lines that cannot be read."""
        while True:
            try:
                return self.update()
            except ConfigError as error:
                self.damaged.append(str(error))

    def report(self) -> RunReport:
        """Return the state of the run now."""
        now = self._now() if self._clock is None else self._clock()
        return self.state.report(now, has_coordinator=self.has_coordinator())

    def _now(self) -> float:
        """Return Unix seconds by the clock of the records: the machine's may have been set since the run began."""
        changed = []
        for file in (self.run.metrics_file, self.run.events_file):
            with suppress(OSError):
                changed.append(file.stat().st_mtime)
        if not changed or self.state.latest is None:
            return time.time()
        return self.state.latest + max(0.0, time.time() - max(changed))

    def has_coordinator(self) -> bool | None:
        """Return whether a coordinator leads the run; None: not known here."""
        if not self.run.control_file.exists():
            return False
        try:
            return self.run.read_control().has_process_here()
        except ConfigError:  # of another user's run, for one
            return None
