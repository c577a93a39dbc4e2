"""The view of a run in a terminal; the same words without control codes where the output is a file or a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chameleon_ft.observe.console import output
from chameleon_ft.observe.records import DETECTED_BY, FailureRecord, JoinRecord, OutcomeRecord, StepRecord, Summary
from chameleon_ft.observe.view import RunInfo
from chameleon_ft.quantities import data_size, duration, in_ranges

__all__ = ["TerminalView"]

_MOST_PIPELINES_SHOWN = 16
_INDENT = (0, 0, 0, 2)  # top, right, bottom, left

_PHASES = {
    "detect_s": "detect",
    "stop_s": "stop",
    "decide_s": "decide",
    "regroup_s": "regroup",
    "transfer_s": "transfer",
}


class TerminalView:
    """Prints a header, a line per step, a banner per failure and a closing table to `console`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console, self._box = output(console)
        self._steps = 0
        self._files = ""

    def started(self, info: RunInfo) -> None:
        """Print what is trained, on what, by whom and where the files go."""
        self._steps, self._files = info.steps, info.run
        facts = _facts()
        facts.add_row("model", info.model)
        facts.add_row("data", info.data)
        facts.add_row("steps", f"{info.first_step} to {info.steps - 1}")
        if info.checkpoint is not None:
            facts.add_row("from", f"the checkpoint of step {info.checkpoint}, the newest that is complete")
        elif info.generation > 1:
            facts.add_row("from", "fresh weights: the run has no complete checkpoint to go on from")
        facts.add_row("files", info.run)
        facts.add_row("layout", _layout(info))
        self._print("Chameleon", style="bold")
        self._print(Padding(facts, _INDENT, expand=False))
        self._print_column_heads()

    def step(self, record: StepRecord) -> None:
        """Print one line."""
        self._print(
            f"{record.step:>7d}  {record.loss:>9.4f}  {record.tokens_per_s:>10,.0f}  "
            f"{record.step_s:>8.3f}  {record.workers:>7d}"
        )

    def failure(self, record: FailureRecord) -> None:
        """Print the banner of a failure: the worker, how it was detected, the action, and the stall by phase."""
        facts = _facts()
        facts.add_row("cause", record.cause)
        facts.add_row("detected by", DETECTED_BY[record.noticed_by])
        if record.lost_layers:
            facts.add_row("lost", f"the last holder of layers {in_ranges(record.lost_layers)}")
        facts.add_row("action", f"{record.policy}: {record.action}")
        self._banner(f"worker {record.worker} lost in step {record.step}", facts, record, colour="red")

    def outcome(self, record: OutcomeRecord) -> None:
        """Print what was predicted of a decision and what was measured, and a warning if these are far apart."""
        self._print(
            Text(
                f"after {record.steps} step{'' if record.steps == 1 else 's'} of {record.policy}: ", style="cyan"
            ).append(record.describe())
        )
        if record.warning is not None:
            self._print(Text(record.warning, style="bold yellow"))

    def join(self, record: JoinRecord) -> None:
        """Print the banner of a join: the workers, the action, and the stall by phase."""
        facts = _facts()
        facts.add_row("action", f"{record.policy}: {record.action}")
        if record.spares:
            facts.add_row("spare", _named(record.spares))
        self._banner(f"{_named(record.workers)} joined before step {record.resume_step}", facts, record, colour="green")

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Print the `message` of an event that has one; the others are for the file."""
        if message := fields.get("message"):
            self._print(Text(f"{name}: {message}", style="cyan"))

    def finished(self, summary: Summary) -> None:
        """Print the closing tables."""
        facts = _facts()
        facts.add_row("because", summary.reason)
        facts.add_row("steps", f"{summary.steps} of {self._steps}" if self._steps else str(summary.steps))
        if summary.final_loss is not None:
            facts.add_row("final loss", f"{summary.final_loss:.4f}")
        facts.add_row(
            "samples",
            f"{summary.samples_seen:,} seen, {summary.samples_lost:,} lost, {summary.samples_repeated:,} repeated",
        )
        if summary.median_step_s_before is not None:
            facts.add_row("step time", _step_times(summary.median_step_s_before, summary.median_step_s_after))
        if self._files:
            facts.add_row("files", self._files)
        parts = [facts] if not summary.failures else [facts, Text(), self._failures(summary)]
        title = Text(summary.status, style="bold")
        self._print(Panel(Group(*parts), title=title, title_align="left", box=self._box, expand=False))

    def _banner(self, title: str, facts: Table, record: FailureRecord | JoinRecord, *, colour: str) -> None:
        """Print facts of a change, with those that every change has: what moved, the stall, where training resumed."""
        if record.rounds:
            facts.add_row("moved", _moved(record))
        facts.add_row("stall", _stall(record))
        facts.add_row("resumed", f"at step {record.resume_step} in generation {record.generation}")
        head = Text(title, style=f"bold {colour}")
        self._print(Panel(facts, title=head, title_align="left", border_style=colour, box=self._box, expand=False))
        self._print_column_heads()

    def _print_column_heads(self) -> None:
        self._print(f"{'step':>7}  {'loss':>9}  {'tokens/s':>10}  {'step s':>8}  {'workers':>7}", style="bold")

    def _failures(self, summary: Summary) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("worker", "step"):
            table.add_column(name, justify="right")
        for name in ("cause", "detected by"):
            table.add_column(name)
        for name in (*_PHASES.values(), "stall s"):
            table.add_column(name, justify="right")
        for record in summary.failures:
            times = (getattr(record, field) for field in (*_PHASES, "stall_s"))
            table.add_row(
                str(record.worker),
                str(record.step),
                record.cause,
                record.noticed_by,
                *("-" if seconds is None else f"{seconds:.3f}" for seconds in times),
            )
        return table

    def _print(self, content: str | Text | Padding | Panel, *, style: str | None = None) -> None:
        # A path or a message from outside may hold square brackets, which are not ours to read as markup.
        self._console.print(content, style=style, markup=False, soft_wrap=isinstance(content, str | Text))


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _layout(info: RunInfo) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("", *(f"stage {number}" for number in range(len(info.stages))))
    table.add_row("", *(f"layers {layers}" for layers in info.stages))
    for number, workers in enumerate(info.pipelines[:_MOST_PIPELINES_SHOWN]):
        table.add_row(f"pipeline {number}", *(f"worker {worker}" for worker in workers))
    if (more := len(info.pipelines) - _MOST_PIPELINES_SHOWN) > 0:
        table.add_row(f"and {more} more")
    return table


def _named(workers: Sequence[int]) -> str:
    if not workers:
        return "no worker"
    return f"worker{'' if len(workers) == 1 else 's'} {', '.join(map(str, workers))}"


def _stall(record: FailureRecord | JoinRecord) -> str:
    known = {name: getattr(record, field, None) for field, name in _PHASES.items()}
    if not (known["transfer"] or 0.0) >= 0.0005:
        del known["transfer"]
    phases = " + ".join(f"{name} {seconds:.3f}" for name, seconds in known.items() if seconds is not None)
    return f"{record.stall_s:.3f} s = {phases}"


def _moved(record: FailureRecord | JoinRecord) -> str:
    rate = f", {data_size(record.moved_bytes / record.transfer_s)}/s" if record.transfer_s else ""
    rounds = f"{record.rounds} round{'' if record.rounds == 1 else 's'}"
    return f"{data_size(record.moved_bytes)} in {rounds} and {duration(record.transfer_s)}{rate}"


def _step_times(before_s: float, after_s: float | None) -> str:
    before = f"median {duration(before_s)}"
    return before if after_s is None else f"{before} before the first failure, {duration(after_s)} after it"
