"""SIGTERM at a drawn step to a drawn part of a run, or to all: nothing is lost, and the same commands resume it.

The environment variable DRAWS sets how many runs are drawn.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import psutil
import pytest

from chameleon_ft.config import Batch, Parallel
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.configs import write_config
from tests.harness import Command, Ended, assert_as_the_plain_loop, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

_STEP = r"^\s+\d+\s+\d+\.\d+\s"
_STEPS = 60
_AFTER = 8  # steps until all are terminated if the run goes on without the part that was

_PARTS = {
    "train": ("launcher", "rank", "all"),
    "hosts": ("coordinator", "agent", "agents", "rank", "all"),
    "workers": ("coordinator", "worker", "workers", "all"),
}


def commands_of(kind: str, config: Path, run: RunDirectory) -> list[tuple[dict[str, str], Sequence[str | Path]]]:
    """Return the command lines of a run, with their environments; the first one displays it."""
    start = (config, "--output-dir", run.path, "--resume", "auto")
    if kind == "train":
        return [({}, ("train", *start))]
    if kind == "hosts":
        return [({}, ("coordinator", *start)), *[({}, ("agent", "--run", run.path, "--workers", "2"))] * 2]
    ranks = ({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} for rank in "01")
    return [({}, ("coordinator", *start)), *((environ, ("worker", "--run", run.path)) for environ in ranks)]


def rank_of(command: Command) -> int:
    """Return the process of a rank that a command has started."""
    children = psutil.Process(command.pid).children(recursive=True)
    return int(max(children, key=lambda child: (child.create_time(), child.pid)).pid)  # nothing is started after them


def terminate(part: str, commands: Sequence[Command]) -> None:
    match part:
        case "rank":
            os.kill(rank_of(commands[-1]), signal.SIGTERM)
        case "launcher" | "coordinator":
            commands[0].signal(signal.SIGTERM)
        case "agent" | "worker":
            commands[-1].signal(signal.SIGTERM)
        case "agents" | "workers":
            for command in commands[1:]:
                os.killpg(command.pid, signal.SIGTERM)
        case "all":
            for command in commands:
                os.killpg(command.pid, signal.SIGTERM)


@pytest.mark.parametrize("seed", range(int(os.environ.get("DRAWS", 3))))
def test_nothing_is_lost_and_the_same_command_lines_resume_the_run(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    kind = random.choice(sorted(_PARTS))
    part, at_step = random.choice(_PARTS[kind]), random.randrange(20)
    workers, batch = 2 if kind == "workers" else 4, Batch(micro_batches=4)
    config = small_config(tmp_path, steps=_STEPS, workers=workers, parallel=Parallel(dp=workers, pp=1), batch=batch)
    file, run = write_config(config, tmp_path), RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        commands = [
            stack.enter_context(Command(*line, environ=environ)) for environ, line in commands_of(kind, file, run)
        ]
        commands[0].read_until(rf"^\s+{at_step}\s")
        processes = [process for command in commands for process in command.session()]
        terminate(part, commands)
        steps = 0
        for line in commands[0]._lines():
            steps += re.search(_STEP, line) is not None
            if steps == _AFTER:
                terminate("all", commands)
        with every_process_ends(processes):
            codes = [command.wait() for command in commands]
        assert codes[0] == os.EX_TEMPFAIL, f"{kind}, {part}: {codes}: {commands[0].printed}"
        assert set(codes[1:]) <= {0, os.EX_TEMPFAIL}, f"{kind}, {part}: {codes}"
    ended = Ended(codes[0], run)
    assert (ended.summary["status"], ended.lost) == ("terminated", set())
    assert complete_checkpoints(run.checkpoints)[-1] == len(ended.steps)
    with ExitStack() as stack:
        commands = [
            stack.enter_context(Command(*line, environ=environ)) for environ, line in commands_of(kind, file, run)
        ]
        codes = [command.wait() for command in commands]
        assert set(codes) == {0}, f"{kind}, {part}: {codes}: {commands[0].printed}"
    ended = Ended(0, run)
    assert ended.steps == [*range(_STEPS)]
    assert_as_the_plain_loop(ended)
