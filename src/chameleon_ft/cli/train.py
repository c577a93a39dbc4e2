"""`chameleon train`: the Llama that comes with Chameleon, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli._prepare import ConfigFile, Resume, StartArguments, prepare_run

__all__ = ["main"]


@dataclass(frozen=True)
class TrainArguments(StartArguments):
    """Train the Llama that comes with Chameleon, with all its worker processes on this machine.

    Every field of the configuration is a flag. What a flag does not set comes from CONFIG, and what that leaves out has
    the default shown here. Ctrl-C ends the run with a checkpoint, a second one at once.
    """

    config: ConfigFile = None
    resume: Resume = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prepared = prepare_run(TrainArguments, arguments, command="train")
    from chameleon_ft.launch import train

    return prepared.start(train)
