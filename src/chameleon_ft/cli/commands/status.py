"""`chameleon status`: the state of a run in a few lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import Switch, parse_arguments
from chameleon_ft.cli.output import Output
from chameleon_ft.errors import StoreError
from chameleon_ft.report.facts import describe_damage, facts_of
from chameleon_ft.session.joining import WatchRequest
from chameleon_ft.storage.checkpoints import damage_of
from chameleon_ft.storage.stores import checkpoint_storage


@dataclass(frozen=True, kw_only=True)
class StatusArguments(WatchRequest):
    """Show the state of a run, live or over: progress, pace, workers, failures, checkpoints and the expected end.

    Only the files of the run are read, so this works wherever its directory can be read, and costs the run nothing.
    Elsewhere, --coordinator has them sent by the coordinator of a live run.
    """

    json: Switch = False
    """Print the state as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(StatusArguments, arguments, command="status", positional=["run"])
    with given.watcher() as watcher:
        watcher.update_readable()
        run, report, damaged = watcher.run, watcher.report(), watcher.damaged
    is_here = given.run is not None
    damage = None
    if is_here and report.checkpoint is not None:
        try:
            damage = damage_of(checkpoint_storage(run.config(), run), report.checkpoint.step)
        except StoreError as error:
            damage = str(error)
    if given.json:
        print(json.dumps({**report.to_json(), "checkpoint_damage": damage, "damaged_lines": damaged}))
        return 0
    out = Output()
    out.text(report.run, "bold")
    facts = facts_of(report)
    if damage is not None:
        facts = (*facts, ("damaged", f"the newest checkpoint: {damage}"))
    if damaged:
        facts = (*facts, ("damaged", describe_damage(damaged)))
    out.facts(facts)
    return 0
