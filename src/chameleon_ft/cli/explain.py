"""`chameleon explain`: each decision of a run, retold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._explain_formatting import why
from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory
from chameleon_ft.observe.decisions import DecisionStory, decision_stories

__all__ = ["main"]


@dataclass(frozen=True)
class ExplainArguments:
    """Retell each decision of a run: what was known, weighed, predicted and measured.

    It reads the run's files only, also while the run is live.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Run directory.")]
    decision: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Only this one, counted from 1."),
    ] = None
    json: Annotated[Switch, optional_argument("", "Print the story as JSON.")] = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ExplainArguments, arguments, command="explain")
    run = RunDirectory.open(given.run)
    stories = decision_stories(run.events())
    chosen = stories if given.decision is None else (_of_number(stories, given.decision),)
    if given.json:
        print(json.dumps({"decisions": [{**story.to_json(), "why": why(story.decided)} for story in chosen]}))
    elif chosen:
        from chameleon_ft.cli._explain_view import show

        show(chosen, title=str(run.path), of=len(stories))
    else:
        print(f"{run.path}: there was nothing to decide; {_describe_losses(run)}")
    return 0


def _of_number(stories: Sequence[DecisionStory], number: int) -> DecisionStory:
    if not 1 <= number <= len(stories):
        known = f"this run has 1 to {len(stories)}" if stories else "this run has none"
        raise ConfigError(f"--decision {number}: there is no such decision; {known}")
    return stories[number - 1]


def _describe_losses(run: RunDirectory) -> str:
    lost = len(run.failures())
    if not lost:
        return "no worker was lost"
    return f"{lost} worker{' was' if lost == 1 else 's were'} lost, and the banners say what was done"
