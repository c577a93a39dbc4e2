"""The part of `benchmarks.gpu` over the library of the device, on one device that four ranks share."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import _chameleon
from benchmarks._chameleon import event_lines
from benchmarks._common import Spread
from benchmarks._gpu_parts import Result, Subject
from benchmarks._gpu_runs import LOST_IN_STEP, completed, migration, snapshots
from benchmarks._gpu_train import DEVIATION, WORKERS, run_config
from benchmarks._neighbours import progress
from chameleon_ft.config import BACKENDS, Failure, FailurePhase, Parallel, Timeouts
from chameleon_ft.registry import imported
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.worker.device import require_devices

_ROUNDS: Final = 2
_WARM_UP: Final = 3
_PHASES: Final[tuple[FailurePhase, ...]] = ("forward", "backward", "sync")
_MPS: Final = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
_HANGS: Final = Timeouts(heartbeat_timeout_s=2.0, watchdog_min_s=4.0, watchdog_factor=3.0)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run over the library: its result, and (generation, kept, formed, seconds) of each time devices connected."""

    result: Result
    connected: tuple[tuple[int, int, int, float], ...]

    def regrouped(self) -> str:
        """Return the communicators of a rank after the first generation, and how long they took, in words."""
        first = min((each[0] for each in self.connected), default=0)
        if not (later := [each for each in self.connected if each[0] > first]):
            return "-"
        kept, formed, seconds = (sorted(column) for column in list(zip(*later, strict=True))[1:])
        return f"{kept[0]} to {kept[-1]} kept, {formed[0]} to {formed[-1]} formed in {max(seconds):.3f} s"


def nccl(subject: Subject) -> Result:
    """Lose, drain and hang ranks over the library of the device, and compare its steps with those over gloo.

    Exits if the ranks cannot share the device over it.
    """
    if subject.library == "gloo":
        raise SystemExit(f"device = {subject.device} has no library of its own")
    over = replace(subject, backend=subject.library, folder=subject.folder / "nccl")
    over.folder.mkdir()
    require_devices(run_config(over), WORKERS)
    runs = dict(_runs(over))
    steps = {backend: _steps_s(replace(over, backend=backend)) for backend in ("gloo", subject.library)}
    ratio = steps[subject.library].median / steps["gloo"].median
    return Result(
        columns=("run", "found", "communicators of a rank"),
        rows=(
            *((name, _found(each.result), each.regrouped()) for name, each in runs.items()),
            *((f"step over {name}, ms", f"{1e3 * own.median:.1f}", "") for name, own in steps.items()),
        ),
        bars=tuple(replace(bar, name=f"{name}: {bar.name}") for name, each in runs.items() for bar in each.result.bars),
        remarks=(
            f"a step takes {ratio:.2f} times as long as over gloo",
            f"{subject.library} {_version(subject)}, {'under' if _MPS.exists() else 'without'} MPS",
        ),
        data={
            "runs": {name: {**each.result.data, "connected": each.connected} for name, each in runs.items()},
            "step_s": {name: own.to_json() for name, own in steps.items()},
        },
    )


def _version(subject: Subject) -> str:
    library = BACKENDS[subject.library].library
    assert library is not None
    return ".".join(map(str, imported(library.version)())) if library.version else "of unknown version"


def _found(result: Result) -> str:
    return "; ".join(
        f"{column}: {cell}" for row in result.rows for column, cell in zip(result.columns, row, strict=True)
    )


def _runs(over: Subject) -> Iterator[tuple[str, _Run]]:
    for phase in _PHASES:
        yield _of(over, f"kill in {phase}", _losing(phase=phase))
    yield _of(over, "hang", _losing(phase="backward", kind="hang", timeouts=_HANGS))
    sliced = Parallel(dp=2, pp=2, optimizer_redundancy=2)
    yield _of(over, "kill with a sliced optimizer", _losing(phase="backward", parallel=sliced))
    yield _of(over, "migration", migration)
    yield _of(over, "snapshots", snapshots)


def _losing(*, phase: FailurePhase, kind: Any = "kill", **changes: Any) -> Callable[[Subject], Result]:
    failure = Failure(worker=WORKERS - 1, step=LOST_IN_STEP, phase=phase, kind=kind)
    return lambda own: completed(own, "run", run_config(own, **changes), failure=failure, limit=DEVIATION)


def _of(over: Subject, name: str, part: Callable[[Subject], Result]) -> tuple[str, _Run]:
    progress(f"over {over.backend}: {name}")
    own = replace(over, folder=over.folder / name.replace(" ", "-"))
    own.folder.mkdir()
    result = part(own)
    (run,) = (RunDirectory(path.parent) for path in own.folder.glob("*/events.jsonl"))
    connected = (each for each in event_lines(run) if each["event"] == "devices_connected")
    return name, _Run(result, tuple((e["generation"], e["kept"], e["formed"], e["seconds"]) for e in connected))


def _steps_s(subject: Subject) -> Spread:
    """Return the median steps of runs without failures."""
    found = []
    for number in range(_ROUNDS):
        progress(f"steps over {subject.backend}, {number + 1} of {_ROUNDS}")
        path = subject.folder / f"steps-{subject.backend}-{number}"
        run = _chameleon.train(run_config(subject), run=path, timeout_s=subject.timeout_s)
        found.append(statistics.median(row.step_s for row in run.steps()[_WARM_UP:]))
    return Spread(tuple(found))
