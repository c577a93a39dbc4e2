"""`chameleon watch`: the state of a run in the terminal, kept up to date."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.report.facts import describe_damage, facts_of
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.story import Notice, notices_of
from chameleon_ft.session.joining import WatchRequest

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_EVERY_S: Final = 0.5
_NEWS: Final = 12
_BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class WatchArguments(WatchRequest):
    """Show the state of a run and its newest events until it is over; Ctrl-C ends only the watching.

    Only the files of the run are read, so any number of terminals can watch without disturbing the run. Where the
    directory cannot be read, --coordinator has them sent by the coordinator of a live run.
    """


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(WatchArguments, arguments, command="watch", positional=["run"])
    from rich.console import Console
    from rich.live import Live

    with given.watcher() as watcher:
        if not sys.stdout.isatty():
            raise ConfigError(
                "standard output is not a terminal; `chameleon status` prints the state once, and `tail -f` follows "
                "events.jsonl of the run"
            )
        screen = _Screen(watcher)
        with Live(screen.drawn(), console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(screen.drawn(), refresh=True)
                if watcher.report().is_over:
                    return 0
                time.sleep(_EVERY_S)


class _Screen:
    """The screen of a run: facts, a curve of the loss, and the newest events, the newest first."""

    def __init__(self, watcher: RunWatcher) -> None:
        self._watcher = watcher
        self._news: deque[tuple[float, Notice]] = deque(maxlen=_NEWS)

    def drawn(self) -> Group:
        """Take in what is new, and return the screen as rich draws it."""
        from rich.console import Group
        from rich.text import Text

        from chameleon_ft.report.terminal import TONES, facts_table

        for record in self._watcher.update_readable():
            self._news.extend((record.time, notice) for notice in notices_of(record))
        report = self._watcher.report()
        facts = facts_table()
        for name, value in facts_of(report):
            facts.add_row(name, Text(value))
        if self._watcher.damaged:
            facts.add_row("damaged", Text(describe_damage(self._watcher.damaged)))
        losses = self._watcher.view.steps.series(60).columns["loss"]
        facts.add_row("loss", Text(sparkline([loss for loss in losses if loss is not None]), style="green"))
        parts: list[RenderableType] = [Text(report.run, style="bold"), facts]
        # A screen that is too low loses its end.
        for at, notice in reversed(self._news):
            clock = datetime.fromtimestamp(at).strftime("%H:%M:%S")
            detail = "; ".join(
                f"{name} {value}" for name, value in notice.facts if name in ("cause", "action", "stall")
            )
            text = Text(f"{clock}  {notice.title}{': ' if detail else ''}{detail}", style=TONES[notice.tone])
            parts.append(text)
        return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of one line, from the least of the values to the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
