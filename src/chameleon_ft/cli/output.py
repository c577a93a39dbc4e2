"""Output of commands: tables on standard output, files, and progress on standard error.

rich is imported where it is used, because `--help` must not wait for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.observe.picture import require_picture
from chameleon_ft.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Output", "compile_kernels", "progress_bar", "require_places", "tell_written", "waiting", "write_schedule"]


class Output:
    """Standard output: framed tables on a terminal, plain text elsewhere. No text is taken for markup."""

    def __init__(self) -> None:
        from chameleon_ft.observe.terminal import output

        self._console, self._box = output()

    @property
    def width(self) -> int:
        """Characters of a line."""
        return self._console.width

    def text(self, text: str, style: str | None = None) -> None:
        """Print a paragraph."""
        self._console.print(text, style=style, soft_wrap=True, markup=False)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def facts(self, rows: Iterable[Sequence[Any]]) -> None:
        """Print rows of a name and a value, which may be rich's; an empty name continues the row before it."""
        from rich.markup import escape

        from chameleon_ft.observe.terminal import facts_table

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
        """Return a table with columns that are aligned left, right, and left again.

        Args:
            styles: of rows, by the first cell.
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
    """Show `text` on standard error while the block runs, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def progress_bar(total: float) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on standard error while the block runs, if that is a terminal.

    Yields a function that takes how much of `total` is done and a text beside the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def compile_kernels(compile_all: Callable[[], None] | None = None, *, long_s: float | None = None) -> None:
    """Compile the kernels of scheduling and search, or load them, so that nothing timed later includes it.

    Says so on standard error if it takes `long_s` or longer.
    """
    from chameleon_ft.recovery import warm_up
    from chameleon_ft.recovery.warm_up import COMPILING, COMPILING_AFTER_S

    after_s = COMPILING_AFTER_S if long_s is None else long_s
    message = threading.Timer(after_s, lambda: print(COMPILING, file=sys.stderr, flush=True))
    message.daemon = True
    message.start()
    try:
        (compile_all or warm_up)()
    finally:
        message.cancel()


def require_places(**files: Path | None) -> None:
    """Raise ConfigError if a file could not be written; call it before anything is computed.

    The names say what the files are. None is a file that was not asked for.
    """
    for what, path in files.items():
        if path is None:
            continue
        if what == "picture":
            require_picture(path)
        folder = path.absolute().parent
        if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"{path}: the {what} cannot be written there; give a file in a folder of your own")


def tell_written(*, json: bool, **files: Path | None) -> None:
    """Print where each file is; on standard error if standard output is JSON. Arguments as of `require_places`."""
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
    """Draw a schedule and write it as a trace, as far as these are asked for; see `draw_schedule`, `write_trace`."""
    if picture is not None:
        from chameleon_ft.observe.schedule_picture import draw_schedule

        draw_schedule(picture, title=title, plan=plan, pipelines=pipelines, lanes=lanes, lost=lost)
    if trace is not None:
        from chameleon_ft.observe.trace import write_trace

        write_trace(trace, plan=plan, pipelines=pipelines, lanes=lanes)
