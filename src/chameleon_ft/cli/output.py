"""Output of commands: tables on standard output, files, and progress on standard error.

rich is imported lazily, because `--help` must not wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.report.picture import Lane, require_picture

if TYPE_CHECKING:
    from rich.table import Table


class Output:
    """Standard output: framed tables on a terminal, plain text elsewhere. Text is never parsed as markup."""

    def __init__(self) -> None:
        from chameleon_ft.report.terminal import output

        self._console, self._box = output()

    @property
    def width(self) -> int:
        """Width of a line, in characters."""
        return self._console.width

    def text(self, text: str, style: str | None = None) -> None:
        """Print a paragraph."""
        self._console.print(text, style=style, soft_wrap=True, markup=False)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def facts(self, rows: Iterable[Sequence[Any]]) -> None:
        """Print (name, value) rows; a value may be a rich renderable, and an empty name continues the previous row."""
        from rich.markup import escape

        from chameleon_ft.report.terminal import facts_table

        table = facts_table()
        for row in rows:
            table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
        self._console.print(table)

    def table(
        self,
        rows: Iterable[Sequence[str]],
        *,
        left: Sequence[str],
        right: Sequence[str],
        last: Sequence[str] = (),
        styles: Mapping[str | None, str] | None = None,
        title: str | None = None,
    ) -> Table:
        """Return a table with the columns `left`, then `right` (aligned right), then `last` (aligned left).

        Args:
            styles: first cell of a row -> style of the row.
        """
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=self._box, title=title, title_justify="left")
        for name in left:
            table.add_column(name)
        for name in right:
            table.add_column(name, justify="right")
        for name in last:
            table.add_column(name)
        for row in rows:
            table.add_row(*map(escape, row), style=(styles or {}).get(row[0]))
        return table


def waiting(text: str) -> AbstractContextManager[object]:
    """Show `text` on standard error while the block runs, if standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def progress_bar(total: float) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on standard error while the block runs, if standard error is a terminal.

    Yields a function of the amount done, out of `total`, and the text to show beside the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def compile_kernels() -> None:
    """Compile or load the kernels of scheduling and search, so that later timings do not include this.

    Prints a message on standard error if they are compiled.
    """
    from chameleon_ft.recovery import warm_up

    warm_up(partial(print, file=sys.stderr, flush=True))


def require_places(**files: Path | None) -> None:
    """Raise ConfigError if one of the files cannot be written; call this before computing anything.

    The keywords say what the files are, for the message; None stands for a file that was not requested.
    """
    for what, path in files.items():
        if path is None:
            continue
        if what == "picture":
            require_picture(path)
        folder = path.absolute().parent
        if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(
                f"{path}: the {what} cannot be written there; give a file in a folder that you can write to"
            )


def tell_written(*, json: bool, **files: Path | None) -> None:
    """Print the path of each file, on standard error if standard output is JSON; see `require_places` for `files`."""
    for what, path in files.items():
        if path is not None:
            print(f"{what} written to {path}", file=sys.stderr if json else sys.stdout)


def write_schedule(
    picture: Path | None,
    trace: Path | None,
    *,
    title: str,
    plan: Plan,
    pipelines: Sequence[Sequence[int]],
    lanes: Sequence[Lane],
    lost: Collection[int],
) -> None:
    """Write a schedule as a picture and as a trace, each if its path is given; see `draw_schedule`, `write_trace`."""
    if picture is not None:
        from chameleon_ft.report.schedule_picture import draw_schedule

        draw_schedule(picture, title=title, plan=plan, pipelines=pipelines, lanes=lanes, lost=lost)
    if trace is not None:
        from chameleon_ft.report.trace import write_trace

        write_trace(trace, plan=plan, pipelines=pipelines, lanes=lanes)
