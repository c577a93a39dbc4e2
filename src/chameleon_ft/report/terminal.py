"""Output to a terminal, or without control codes to a file or a pipe; and the view of a run in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, cast

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import (
    FailureRecord,
    Started,
    StepRecord,
)
from chameleon_ft.events.summary import Summary
from chameleon_ft.quantities import duration
from chameleon_ft.report.story import PHASES, notices_of
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.recorder import View

_PLAIN_WIDTH = 120
_TRAILING_BLANKS = re.compile(r" +$", re.MULTILINE)
_MAX_PIPELINES_SHOWN = 16
_OUTPUT = Path("standard output")
_MAX_WAITING_LINES = 10_000
TONES: Final = {"bad": "red", "good": "green", "note": "cyan", "warning": "bold yellow"}
"""Styles of what is told, by its tone."""


def output(console: Console | None = None) -> tuple[Console, box.Box]:
    """Return `console`, or one for standard output, and the frame for its tables.

    Without a terminal the frame is plain, and lines have no trailing blanks.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return console, box.ROUNDED
    console.file = cast("IO[str]", _Trimmed(console.file))
    console.width = _PLAIN_WIDTH
    return console, box.ASCII


class _Trimmed:
    """As much of a text file as rich needs, which writes whole lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_TRAILING_BLANKS.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._file.flush()


def facts_table() -> Table:
    """Return an empty table for names, which are not wrapped, and values, which are."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


class TerminalView(View):
    """Prints a header, a line per step, a banner per failure and a closing table to `console`.

    A terminal may be stopped, and a pipe not read. Like a disk that does not answer, see `FileQueue`, that holds up no
    call for more than a moment; only `close` waits. `steps` and `files` are of a run that has started already; see
    `Started`.
    """

    def __init__(self, console: Console | None = None, *, steps: int = 0, files: str = "") -> None:
        self._console, self._box = output(console)
        self._queue = FileQueue()
        self._steps = steps
        self._files = files
        # Whether the heads of the columns were printed since the last banner.
        self._has_heads = True

    def show(self, record: Record) -> None:
        """Print a step as a line, an incident or a switch in a frame, and other events that have a message."""
        match record:
            case StepRecord():
                self._step(record)
            case Started():
                self._started(record)
            case _:
                self._tell(record)

    def _started(self, info: Started) -> None:
        """Print the model, the data, the steps, the run directory and the layout."""
        self._steps, self._files = info.steps, info.run
        facts = facts_table()
        facts.add_row("model", info.model)
        facts.add_row("data", info.data)
        facts.add_row("steps", f"{info.first_step} to {info.steps - 1}")
        if info.checkpoint is not None:
            facts.add_row("from", f"the checkpoint of step {info.checkpoint}, the newest that is complete")
        elif info.generation > 1:
            facts.add_row("from", "fresh weights: the run has no complete checkpoint to continue from")
        facts.add_row("files", info.run)
        facts.add_row("layout", _layout(info))
        self._print("Chameleon", style="bold")
        self._print(Padding(facts, (0, 0, 0, 2), expand=False))
        self._has_heads = False

    def _step(self, record: StepRecord) -> None:
        """Print one line, unless very many wait."""
        if self._queue.num_waiting > _MAX_WAITING_LINES:
            return
        if not self._has_heads:
            self._has_heads = True
            rate = f"{record.unit}/s"
            self._print(f"{'step':>7}  {'loss':>9}  {rate:>10}  {'step s':>8}  {'workers':>7}", style="bold")
        loss = "skipped" if record.is_skipped else f"{record.loss:.4f}"
        self._print(
            f"{record.step:>7d}  {loss:>9}  {record.tokens_per_s:>10,.0f}  {record.step_s:>8.3f}  {record.workers:>7d}"
        )

    def finished(self, summary: Summary) -> None:
        """Print the closing tables."""
        facts = facts_table()
        facts.add_row("because", summary.reason)
        total = f" of {self._steps - summary.first_step}" if self._steps else ""
        fork = f", from the fork at step {summary.first_step}" if summary.first_step else ""
        facts.add_row("steps", f"{summary.steps}{total}{fork}")
        if summary.final_loss is not None:
            facts.add_row("final loss", f"{summary.final_loss:.4f}")
        facts.add_row(
            "samples",
            f"{summary.samples_seen:,} seen, {summary.samples_lost:,} lost, {summary.samples_repeated:,} repeated"
            f"{f', {summary.samples_skipped:,} skipped' if summary.samples_skipped else ''}",
        )
        if summary.median_step_s_before is not None:
            times = f"median {duration(summary.median_step_s_before)}"
            if summary.median_step_s_after is not None:
                times += f" before the first failure, {duration(summary.median_step_s_after)} after it"
            facts.add_row("step time", times)
        if self._files:
            facts.add_row("files", self._files)
        parts = [facts] if not summary.failures else [facts, Text(), _failures_table(summary.failures)]
        title = Text(summary.status, style="bold")
        self._print(Panel(Group(*parts), title=title, title_align="left", box=self._box, expand=False))

    def _tell(self, record: Record) -> None:
        """Print a record as lines, and what has facts in a frame."""
        for notice in notices_of(record):
            if not notice.facts:
                self._print(Text(notice.title, style=TONES[notice.tone]))
                continue
            facts = facts_table()
            for name, value in notice.facts:
                facts.add_row(name, value)
            colour = TONES[notice.tone]
            head = Text(notice.title, style=f"bold {colour}")
            self._print(Panel(facts, title=head, title_align="left", border_style=colour, box=self._box, expand=False))
            self._has_heads = False

    def _print(self, content: str | Text | Padding | Panel, *, style: str | None = None) -> None:
        def act() -> None:
            # Training does not depend on a display, whose output may go to a disk that is full, or to a closed pipe.
            with suppress(OSError):
                # A path or a message may contain square brackets, which are not markup.
                self._console.print(content, style=style, markup=False, soft_wrap=isinstance(content, str | Text))

        # This raises an error of an earlier call.
        self._queue.news()
        self._queue.submit(_OUTPUT, act)

    def close(self) -> None:
        """Wait until all is printed; print nothing more."""
        self._queue.ask(_OUTPUT, lambda: None).result()
        self._queue.__exit__()


def _failures_table(failures: Sequence[FailureRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "step", "cause", "detected by", *PHASES.values(), "stall s"):
        table.add_column(name, justify="left" if name in ("cause", "detected by") else "right")
    for record in failures:
        times = (getattr(record, field) for field in (*PHASES, "stall_s"))
        seconds = ("-" if value is None else f"{value:.3f}" for value in times)
        table.add_row(str(record.worker), str(record.step), record.cause, record.noticed_by, *seconds)
    return table


def _layout(info: Started) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("", *(f"stage {number}" for number in range(len(info.stages))))
    table.add_row("", *(f"layers {layers}" for layers in info.stages))
    for number, workers in enumerate(info.pipelines[:_MAX_PIPELINES_SHOWN]):
        table.add_row(f"pipeline {number}", *(f"worker {worker}" for worker in workers))
    if (more := len(info.pipelines) - _MAX_PIPELINES_SHOWN) > 0:
        table.add_row(f"and {more} more")
    return table
