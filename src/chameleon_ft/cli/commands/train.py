"""`chameleon train`: train the built-in Llama, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import Page, StartArguments, page_beside, parse_start, with_page_address
from chameleon_ft.session.start import prepare_run


@dataclass(frozen=True, kw_only=True)
class TrainArguments(StartArguments):
    """Train the built-in Llama, with all worker processes on this machine.

    Every field that is set by hand is a flag. A flag overrides CONFIG; fields that neither sets have the defaults
    shown here. Ctrl-C or SIGTERM ends the run with a checkpoint; a second one ends it at once.
    """

    page: Page = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(TrainArguments, with_page_address(arguments), command="train")
    with page_beside(given.page) as shown:
        prepared = prepare_run(given.request(flags))
        from chameleon_ft.launch.local import train

        with shown(prepared.directory):
            return prepared.start(train)
