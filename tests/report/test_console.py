"""Output to a terminal, and to a file in its place."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from chameleon_ft.report.terminal import output


def printed(*, terminal: bool) -> tuple[box.Box, str]:
    """Return the frame for tables, and the output of a table without a frame."""
    file = io.StringIO()
    console, frame = output(Console(file=file, force_terminal=terminal, width=40, no_color=True))
    table = Table(box=None, show_header=False)
    table.add_row("short")
    table.add_row("a longer line")
    console.print(table)
    console.print("between", end="  \n\n")
    console.print("x" * 100)
    return frame, file.getvalue()


def test_in_a_file_no_line_ends_in_blanks_and_all_are_wide() -> None:
    frame, text = printed(terminal=False)
    assert frame is box.ASCII
    assert text == f" short\n a longer line\nbetween\n\n{'x' * 100}\n"


def test_a_terminal_is_left_as_it_is() -> None:
    frame, text = printed(terminal=True)
    assert frame is box.ROUNDED
    assert " short         \n a longer line \n" in text
    assert "x" * 41 not in text
