"""How long does training stand still when a worker is killed, beside a restart by torchrun and beside torchft?

Every run trains the same model on the same number of cores and loses one process to SIGKILL. The process itself records
the time of the kill, and stamps in the model everything after it: see _stamped_job.py. Measured:

  stall         from the kill to the first forward of the first layer in the repeated step; salvage is off, because the
                stamps do not show where a step that is completed goes on
  until commit  from the kill to the first update after it by a survivor
  lost          `until commit` less the median of the steps that follow: the cost of the failure

torchft computes the next step while it forms a quorum, so it has no stall in the first sense, and is compared by what
is lost. Its shortest workable settings are searched: those of --torchft-timeouts-ms that lose least, among those with
which, at every kill, all replicas stepped together until then, and all survivors at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks import _chameleon, _torchft, _torchrun
from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Failure, FailurePhase, TrainConfig

_PHASES: tuple[FailurePhase, ...] = ("forward", "backward", "sync", "vote", "optimizer")
_PARTS = ("detect_s", "stop_s", "decide_s", "regroup_s")
_SYSTEMS = ("chameleon", "torchrun", "torchft")

_LONGEST_STALL_S = 0.3
_MIN_RATIOS = {"torchrun": 10.0, "torchft default": 10.0, "torchft shortest": 1.0}

_Kill = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Measured:
    """The kills of one system under one setting, each with its times by name."""

    name: str
    kills: tuple[_Kill, ...]

    def spread(self, field: str) -> Spread:
        return Spread(tuple(kill[field] for kill in self.kills))

    def median(self, field: str) -> float:
        return self.spread(field).median

    def row(self) -> tuple[str, ...]:
        columns = ("stall_s", "until_commit_s", "lost_s")
        cells = (self.spread(field).shown() if field in self.kills[0] else "-" for field in columns)
        return (self.name, str(len(self.kills)), *cells)

    def part_rows(self) -> list[tuple[str, ...]]:
        """Return a row for each known part of the stall."""
        known = (part for part in _PARTS if part in self.kills[0])
        return [(f"  {part.removesuffix('_s')}", "", self.spread(part).shown(), "", "") for part in known]

    def to_json(self) -> dict[str, Any]:
        numbers = sorted(field for field, value in self.kills[0].items() if isinstance(value, float))
        return {"kills": list(self.kills), **{field: self.spread(field).to_json() for field in numbers}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experiment:
    """Settings of all runs."""

    given: argparse.Namespace
    config: TrainConfig
    folder: Path
    neighbours: Neighbours

    def chameleon(self) -> _Measured:
        """Kill each worker in turn, in each phase of a step in turn."""
        places = zip(cycle(range(self.config.workers)), cycle(_PHASES), strict=False)
        kills = []
        for number, (worker, phase) in enumerate(islice(places, self.given.kills)):
            progress(f"chameleon, kill {number + 1} of {self.given.kills}: worker {worker}, {phase}")
            failure = Failure(step=self.given.kill_step, worker=worker, phase=phase)
            kills.append(self._undisturbed(partial(self._chameleon_kill, failure), f"chameleon-{number}"))
        return _Measured("chameleon", tuple(kills))

    def torchrun(self) -> _Measured:
        """Kill ranks of both stages right after a checkpoint, so that hardly a step is repeated."""
        kills = []
        for number in range(self.given.torchrun_kills):
            kill = _torchrun.Kill(rank=(3 * number + 1) % self.config.workers, step=self.given.kill_step)
            progress(f"torchrun, kill {number + 1} of {self.given.torchrun_kills}: rank {kill.rank}")
            kills.append(self._undisturbed(partial(self._torchrun_kill, kill), f"torchrun-{number}"))
        return _Measured("torchrun", tuple(kills))

    def torchft_default(self) -> _Measured:
        settings = _torchft.Settings()
        kills = self._torchft_kills(settings, "torchft-default", self.given.torchft_default_kills, _went_on)
        if kills is None:
            raise SystemExit(f"torchft did not go on at its default settings: see its logs in {self.folder}")
        survivors = self.config.parallel.dp - 1
        ended = ", ".join(str(kill["survivors_ended"]) for kill in kills)
        return _Measured(f"torchft default (of {survivors} survivors reached the end: {ended})", kills)

    def torchft_shortest(self) -> _Measured:
        """Return the results of the settings with the smallest median loss among those that work every time."""
        workable = []
        for settings in _candidates(self.given.torchft_timeouts_ms):
            name = f"torchft-{settings}".replace(",", "").replace(" ", "-")
            kills = self._torchft_kills(settings, name, self.given.torchft_kills, _is_workable)
            if kills is None:
                progress(f"torchft, {settings}: not workable")
            else:
                workable.append(_Measured(f"torchft shortest: {settings}", kills))
        if not workable:
            raise SystemExit("torchft works with none of these settings; give longer --torchft-timeouts-ms")
        return min(workable, key=lambda measured: measured.median("lost_s"))

    def _torchft_kills(
        self, settings: _torchft.Settings, name: str, count: int, good: Callable[[_Kill | None], bool]
    ) -> tuple[_Kill, ...] | None:
        """Kill each replica in turn; return None at the first kill that is not `good`."""
        kills = []
        for number in range(count):
            replica = number % self.config.parallel.dp
            progress(f"torchft, {settings}, kill {number + 1} of {count}: replica {replica}")
            kill = self._undisturbed(partial(self._torchft_kill, settings, replica), f"{name}-{number}")
            if not good(kill):
                return None
            kills.append(kill)
        return tuple(kills)

    def _chameleon_kill(self, failure: Failure, path: Path) -> _Kill:
        # A repeated step begins with a forward of the first layer, which the stamps tell; a completed one need not.
        run = _chameleon.train(self.config, run=path, failures=[failure], salvage=False, timeout_s=self.given.timeout)
        return _chameleon.recovery_of(run, failure).to_json()

    def _torchrun_kill(self, kill: _torchrun.Kill, path: Path) -> _Kill:
        every = max(1, kill.step // 2)
        _torchrun.train(self.config, out=path, timeout_s=self.given.timeout, checkpoint_every=every, kill=kill)
        return asdict(_torchrun.restart_of(path, kill))

    def _torchft_kill(self, settings: _torchft.Settings, replica: int, path: Path) -> _Kill | None:
        replicas = self.config.parallel.dp
        ended = _torchft.train(
            self.config,
            python=self.given.torchft_python,
            out=path,
            replicas=replicas,
            settings=settings,
            timeout_s=self.given.timeout,
            kill=(replica, self.given.kill_step),
        )
        exclusion = _torchft.exclusion_of(path, replica=replica)
        if exclusion is None:
            return None
        together = ended == replicas - 1 and _torchft.together(path, replica=replica, replicas=replicas)
        return {**asdict(exclusion), "survivors_ended": ended, "together": together}

    def _undisturbed(self, measure: Callable[[Path], Any], name: str) -> Any:
        return self.neighbours.undisturbed(measure, self.folder / name)


def _went_on(kill: _Kill | None) -> bool:
    return kill is not None


def _is_workable(kill: _Kill | None) -> bool:
    return kill is not None and bool(kill["together"])


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    config = base_config(given.config, steps=given.kill_step + given.steps_after)
    experiment = _Experiment(given=given, config=config, folder=folder, neighbours=neighbours)
    found: dict[str, _Measured] = {}
    if "chameleon" in given.systems:
        found["chameleon"] = experiment.chameleon()
    if "torchrun" in given.systems:
        found["torchrun"] = experiment.torchrun()
    if "torchft" in given.systems:
        found["torchft default"] = experiment.torchft_default()
        found["torchft shortest"] = experiment.torchft_shortest()
    report = Report(
        benchmark="stall",
        columns=("seconds: median (least to largest)", "kills", "stall", "until commit", "lost"),
        rows=tuple(row for measured in found.values() for row in (measured.row(), *measured.part_rows())),
        bars=_bars(found),
        results={name: {"settings": measured.name, **measured.to_json()} for name, measured in found.items()},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="stall")
    add_most_others(parser)
    parser.add_argument("--systems", nargs="+", choices=_SYSTEMS, default=_SYSTEMS)
    parser.add_argument("--kill-step", type=int, default=8, help="step in which a process is killed")
    parser.add_argument("--steps-after", type=int, default=8, help="steps of a run from there on")
    parser.add_argument("--kills", type=int, default=10, help="runs of chameleon, each with one kill")
    parser.add_argument("--torchrun-kills", type=int, default=3)
    parser.add_argument("--torchft-default-kills", type=int, default=3, help="each takes over a minute")
    parser.add_argument("--torchft-kills", type=int, default=5, help="with each of the shorter settings")
    parser.add_argument(
        "--torchft-timeouts-ms", type=int, nargs="+", default=(500, 300, 200, 100), help="shorter settings to try"
    )
    parser.add_argument(
        "--torchft-python",
        type=Path,
        default=ROOT / "benchmarks" / ".venv-torchft" / "bin" / "python",
        help="interpreter that has torchft; docs/benchmarks.md says how to get one",
    )
    given = parser.parse_args()
    given.torchft_python = given.torchft_python.absolute()
    if "torchft" in given.systems and not given.torchft_python.exists():
        parser.error(
            f"--torchft-python {given.torchft_python}: there is none; docs/benchmarks.md says how to make it, "
            "or leave torchft out by --systems"
        )
    return given


def _candidates(timeouts_ms: Sequence[int]) -> list[_torchft.Settings]:
    """Return settings with one value for all timeouts, ten heartbeats in it, and optionally for stragglers."""
    return [
        _torchft.Settings(
            heartbeat_ms=max(1, timeout // 10),
            timeout_ms=timeout,
            heartbeat_timeout_ms=timeout,
            join_timeout_ms=join,
            quorum_tick_ms=max(1, timeout // 20),
        )
        for timeout in sorted(timeouts_ms, reverse=True)
        for join in (None, timeout)
    ]


def _bars(found: Mapping[str, _Measured]) -> tuple[Bar, ...]:
    if "chameleon" not in found:
        return ()
    stall = found["chameleon"].median("stall_s")
    bars = [Bar(name="chameleon's median stall, seconds", value=stall, limit=_LONGEST_STALL_S)]
    for name, least in _MIN_RATIOS.items():
        if name in found:
            field = "stall_s" if name == "torchrun" else "lost_s"
            ratio = found[name].median(field) / found["chameleon"].median(field)
            what = f"{field.removesuffix('_s')} of {name} over chameleon's, medians"
            bars.append(Bar(name=what, value=ratio, limit=least, at_least=True))
    return tuple(bars)


if __name__ == "__main__":
    raise SystemExit(main())
