"""The flag `--page` of commands that start a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalStr, metavar
from chameleon_ft.cli.starting import PreparedRun

__all__ = ["DEFAULT_ADDRESS", "Page", "shown_on_page", "with_page_address"]

DEFAULT_ADDRESS: Final = "127.0.0.1:8790"

Page = Annotated[
    OptionalStr,
    metavar(
        "[HOST:PORT]",
        f"Show the run on a page in the browser, by default at {DEFAULT_ADDRESS}, for this machine alone. See "
        "docs/watching.md.",
    ),
]

_ADDRESS = re.compile(r"(\S*:)?\d+")


def with_page_address(arguments: Sequence[str]) -> list[str]:
    """Give a `--page` without an address the default one."""
    found = list(arguments)
    for index, argument in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else ""
        if argument == "--page" and not _ADDRESS.fullmatch(following):
            found[index] = f"--page={DEFAULT_ADDRESS}"
    return found


@contextmanager
def shown_on_page(address: str | None) -> Iterator[Callable[[PreparedRun, Callable[..., int]], int]]:
    """Take the address of the page, if one is wanted; yield what starts a run, with the page beside it.

    Raises ConfigError if the address cannot be taken.
    """
    if address is None:
        yield lambda prepared, entry: prepared.start(entry)
        return
    from chameleon_ft.launch.page import PageServer

    server = PageServer(address)

    def start(prepared: PreparedRun, entry: Callable[..., int]) -> int:
        with server.beside(prepared.directory):
            return prepared.start(entry)

    yield start
