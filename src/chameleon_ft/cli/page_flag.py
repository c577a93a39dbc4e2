"""The flag `--page` of commands that start a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalStr, metavar
from chameleon_ft.observe import RunDirectory

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
def page_beside(address: str | None) -> Iterator[Callable[[RunDirectory], AbstractContextManager[None]]]:
    """Take the address of the page for the block, if one is wanted; yield what serves the page of a run in another.

    Raises ConfigError if the address cannot be taken.
    """
    if address is None:
        yield lambda run: nullcontext()
        return
    from chameleon_ft.launch.page import PageServer

    with closing(PageServer(address)) as server:
        yield server.beside
