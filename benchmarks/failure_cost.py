"""How many steps does a failure cost? Single losses at random moments of a step.

Five parts; --parts picks some. Each compares two settings.

  emulated             32 emulated workers, 8 pipelines of 4 stages of a Llama 2 7B, 128 micro-batches: with
                       `recovery.salvage`, and without it
  real                 the same on eight CPU workers, with the model and the layout of the quick start
  emulated-migration   the policy `chameleon`, after whose losses layers move during training, and `reroute`
  real-migration       the same on eight CPU workers, with a model of 600 MB of state
  backends             eight workers of the quick start on the pretended accelerator of tests/pretended, over its
                       library, whose communicators take --creation-s each, and over gloo

A worker is lost to SIGKILL. Worker and moment are drawn from --seed, the moment evenly over a step. Runs with the two
settings alternate; two of a pair have the same draws. A run loses one worker, so that every loss is
in the layout of the start. With more (--losses-per-run), the lost worker is started again, and the next loss waits
until all workers have made `--settled` steps under one plan, which may be another than at the start. Measured:

  cost       time between the commits before and after the interrupted step, less the median time between the commits
             before it (of the same plan), over that median
  repeated   work that is repeated, in such median steps, as the run recorded it
  stall      from the loss to the first operation after it, in seconds
  moved      bytes that moved during training after the loss

A loss after which the step could not be completed, but was repeated, counts like any other; the table has their number.
Runs whose results are in --out are not made again, so an interrupted benchmark can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, arguments, base_config, markdown_table
from benchmarks._failure_costs import Draw, LossCost, draws, observe, read_costs, write_costs
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import (
    STAND_IN_JOB,
    Batch,
    Checkpoint,
    Emulation,
    Parallel,
    PolicyName,
    Recovery,
    RunConfig,
    Snapshots,
)
from tests.backends import use_backend

_Setting = Callable[[RunConfig], RunConfig]
_LIBRARY: Final = "pretended-nccl"


def _recovering(**changes: Any) -> _Setting:
    return lambda config: config.model_copy(update={"recovery": config.recovery.model_copy(update=changes)})


def _over(backend: str) -> _Setting:
    return lambda config: config.model_copy(update={"device": "npu", "backend": backend, "share_devices": True})


_SALVAGE: Final = {"salvage": _recovering(salvage=True), "no salvage": _recovering(salvage=False)}
_MIGRATION: Final = {"migration": _recovering(policy="chameleon"), "reroute": _recovering(policy="reroute")}
_PARTS: Final[Mapping[str, Mapping[str, _Setting]]] = {
    "emulated": _SALVAGE,
    "real": _SALVAGE,
    "emulated-migration": _MIGRATION,
    "real-migration": _MIGRATION,
    "backends": {_LIBRARY: _over(_LIBRARY), "gloo": _over("gloo")},
}
_ALWAYS: Final = 1_000_000  # more steps, and restarts of a worker, than there are
_SETTINGS: Final = (
    "losses",
    "losses_per_run",
    "settled",
    "seed",
    "policy",
    "time_scale",
    "respawn_delay_s",
    "creation_s",
)

_EMULATED_COST, _EMULATED_LARGE_COST = 0.20, 0.30
_REAL_REPEATED, _REAL_RATIO = 0.15, 0.65
_STALL_RATIO: Final = 1.1
_BACKENDS_RATIO: Final = 1.3
_PREDICTION_ERROR: Final = 0.15
_ROUNDING: Final = 0.001
_OTHER_MEDIAN: Final = "because a run compares with the durations of its last ten steps, under whatever plan"
_COLUMNS: Final = (
    "part",
    "setting",
    "losses",
    "cost, steps: median (least to largest)",
    "90th percentile",
    "repeated",
    "stall, s",
    "moved, GB",
    "mean error of predicted cost",
    "not salvaged",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The losses of one part with one setting."""

    part: str
    setting: str
    costs: tuple[LossCost, ...]

    @property
    def cost(self) -> Spread:
        return Spread(tuple(each.cost for each in self.costs))

    @property
    def large_cost(self) -> float:
        """The 90th percentile of the cost."""
        return _large(self.cost.values)

    @property
    def repeated(self) -> Spread:
        return Spread(tuple(each.repeated for each in self.costs))

    @property
    def stall_s(self) -> Spread:
        return Spread(tuple(each.stall_s for each in self.costs))

    @property
    def moved_gb(self) -> Spread:
        return Spread(tuple(each.moved_bytes / 1e9 for each in self.costs))

    @property
    def prediction_error(self) -> float | None:
        """Mean size of the relative errors of predicted costs; None if nothing was predicted."""
        errors = [abs(each.prediction_error) for each in self.costs if each.prediction_error is not None]
        return statistics.mean(errors) if errors else None

    @property
    def not_salvaged(self) -> int:
        return sum(not each.is_salvaged for each in self.costs)

    @property
    def in_other_layouts(self) -> int:
        """Number of losses after the policy had left the layout of the start."""
        return sum(not each.is_first_layout for each in self.costs)

    @property
    def inconsistency(self) -> float:
        """Largest difference of a recorded cost from its definition."""
        return max(each.inconsistency for each in self.costs)

    @property
    def difference(self) -> float:
        """Largest difference of a recorded cost from the cost here, whose median is of steps of one plan only."""
        return max((abs(each.cost - each.recorded) for each in self.costs if each.recorded is not None), default=0.0)

    def row(self) -> tuple[str, ...]:
        """Return a row of the table."""
        error = self.prediction_error
        return (
            self.part,
            self.setting,
            str(len(self.costs)),
            self.cost.shown(2),
            f"{self.large_cost:.2f}",
            self.repeated.shown(2),
            self.stall_s.shown(),
            self.moved_gb.shown(1),
            "" if error is None else f"{error:.1%}",
            str(self.not_salvaged) if self.setting != "no salvage" else "",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cost": self.cost.to_json(),
            "cost_90th_percentile": self.large_cost,
            "repeated": self.repeated.to_json(),
            "stall_s": self.stall_s.to_json(),
            "moved_gb": self.moved_gb.to_json(),
            "prediction_error": self.prediction_error,
            "not_salvaged": self.not_salvaged,
            "in_other_layouts": self.in_other_layouts,
            "largest_inconsistency": self.inconsistency,
            "largest_difference_to_record": self.difference,
            "losses": [asdict(each) for each in self.costs],
        }


def main() -> int:
    given = _arguments()
    folder: Path = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _same_settings(given, folder)
    neighbours = Neighbours(most=given.max_others)
    configs: Mapping[str, Callable[[], RunConfig]] = {
        "emulated": partial(emulated_config, given),
        "real": partial(real_config, given),
        "emulated-migration": partial(emulated_config, given),
        "real-migration": partial(large_config, given),
        "backends": partial(real_config, given),
    }
    if "backends" in given.parts:
        use_backend(_LIBRARY)
        os.environ["PRETENDED_NCCL_CREATION_S"] = str(given.creation_s)
    found: list[Measured] = []
    for part in given.parts:
        found += _measured(part, configs[part](), given, folder, neighbours)
    for measured in found:
        _tell(measured)
    if given.markdown is not None:
        given.markdown.write_text(markdown_table(_COLUMNS, (each.row() for each in found)), encoding="utf-8")
    report = Report(
        benchmark="failure_cost",
        columns=_COLUMNS,
        rows=tuple(each.row() for each in found),
        bars=bars(found),
        results={"settings": _settings(given), **{f"{each.part}, {each.setting}": each.to_json() for each in found}},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def emulated_config(given: argparse.Namespace) -> RunConfig:
    """Return the configuration of the emulated workers, which `benchmarks.policies` has too."""
    return RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=given.profile,
        workers=32,
        steps=_ALWAYS,
        seed=given.seed,
        parallel=Parallel(dp=8, pp=4, split_backward=True, optimizer_redundancy="all"),
        batch=Batch(micro_batches=128, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        recovery=_recovery(given),
        emulation=Emulation(time_scale=given.time_scale),
    )


def real_config(given: argparse.Namespace) -> RunConfig:
    """Return the configuration of the CPU workers."""
    return base_config(given.config, stamped=False, steps=_ALWAYS, recovery=_recovery(given))


def large_config(given: argparse.Namespace) -> RunConfig:
    """Return the configuration of the CPU workers with a model of 50 million parameters, 600 MB with their moments."""
    config = base_config(given.config, stamped=False, steps=_ALWAYS, recovery=_recovery(given))
    model = config.model.model_copy(update={"dim": 512, "num_layers": 17, "ffn_dim": 1408, "seq_len": 16})
    return config.model_copy(update={"model": model, "batch": config.batch.model_copy(update={"micro_batch_size": 1})})


def _recovery(given: argparse.Namespace) -> Recovery:
    return Recovery(
        policy=given.policy,
        host_failure_fraction=0.0,
        respawn=given.losses_per_run > 1,
        respawn_delay_s=given.respawn_delay_s,
        max_respawns=_ALWAYS,
    )


def _measured(
    part: str, config: RunConfig, given: argparse.Namespace, folder: Path, neighbours: Neighbours
) -> list[Measured]:
    """Return the losses of a part with each of its settings, from runs in turns."""
    costs: dict[str, list[LossCost]] = {setting: [] for setting in _PARTS[part]}
    for pair, first in enumerate(range(0, given.losses, given.losses_per_run)):
        count = min(given.losses_per_run, given.losses - first)
        losses = draws(f"{given.seed} {part} {pair}", workers=config.workers, count=count)
        for setting, of_setting in _PARTS[part].items():
            name = f"{part}-{setting.replace(' ', '-')}-{pair}"
            progress(f"{part}, {setting}, losses {first + 1} to {first + count} of {given.losses}")
            costs[setting] += _run(of_setting(config), losses, given, folder / name, neighbours)
    return [Measured(part=part, setting=setting, costs=tuple(each)) for setting, each in costs.items()]


def _run(
    config: RunConfig, losses: Sequence[Draw], given: argparse.Namespace, path: Path, neighbours: Neighbours
) -> tuple[LossCost, ...]:
    """Return the losses of a run, which is made unless its result exists."""
    result = path.with_suffix(".json")
    if not result.exists():

        def measure(run: Path) -> tuple[LossCost, ...]:
            return observe(config, run=run, losses=losses, settled=given.settled, timeout_s=given.timeout)

        write_costs(neighbours.undisturbed(measure, _free(path)), result)
    return read_costs(result)


def _free(path: Path) -> Path:
    """Return a new run directory, beside those of interrupted runs."""
    number = sum(1 for other in path.parent.glob(f"{path.name}*") if other.is_dir())
    return path.with_name(f"{path.name}-{number + 1}") if number else path


def _tell(measured: Measured) -> None:
    """Print facts that the table lacks: other layouts, differences from the run's own records, repeated steps."""
    part = f"{measured.part}, {measured.setting}"
    if measured.in_other_layouts:
        progress(f"{part}: {measured.in_other_layouts} losses in another layout than that of the start")
    progress(f"{part}: recorded costs differ by up to {measured.difference:.3f}, {_OTHER_MEDIAN}")
    if measured.inconsistency > _ROUNDING:
        progress(f"{part}: and by up to {measured.inconsistency:.3f} from their definition")
    for number, each in enumerate(measured.costs, start=1):
        where = f"{part}, loss {number} (worker {each.worker}, step {each.step})"
        if measured.setting != "no salvage" and not each.is_salvaged:
            progress(f"{where}: not salvaged, {each.policy}: {each.action}")
        if each.recorded is None:
            progress(f"{where}: no cost was recorded")


def bars(found: Sequence[Measured]) -> tuple[Bar, ...]:
    """Return the limits of the parts that were measured."""
    by_name = {(each.part, each.setting): each for each in found}
    asked = []
    if emulated := by_name.get(("emulated", "salvage")):
        asked += [
            Bar(name="emulated, median cost", value=emulated.cost.median, limit=_EMULATED_COST),
            Bar(name="emulated, 90th percentile", value=emulated.large_cost, limit=_EMULATED_LARGE_COST),
        ]
    if real := by_name.get(("real", "salvage")):
        ratio = real.cost.median / by_name["real", "no salvage"].cost.median
        asked += [
            Bar(name="real, median of repeated work", value=real.repeated.median, limit=_REAL_REPEATED),
            Bar(name="real, cost with salvage over without, medians", value=ratio, limit=_REAL_RATIO),
        ]
    for part in ("emulated-migration", "real-migration"):
        if moving := by_name.get((part, "migration")):
            ratio = moving.stall_s.median / by_name[part, "reroute"].stall_s.median
            asked.append(Bar(name=f"{part}, stall over that of reroute, medians", value=ratio, limit=_STALL_RATIO))
    if library := by_name.get(("backends", _LIBRARY)):
        gloo, what = by_name["backends", "gloo"], f"over {_LIBRARY}, by that over gloo, medians"
        ratios = {
            "stall": library.stall_s.median / gloo.stall_s.median,
            "cost": library.cost.median / gloo.cost.median,
        }
        asked += [Bar(name=f"{name} {what}", value=ratio, limit=_BACKENDS_RATIO) for name, ratio in ratios.items()]
    for measured in (emulated, real):
        if measured is not None and (error := measured.prediction_error) is not None:
            name = f"{measured.part}, mean error of predicted cost"
            asked.append(Bar(name=name, value=error, limit=_PREDICTION_ERROR))
    return tuple(asked)


def _large(values: Sequence[float]) -> float:
    """Return the 90th percentile."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(given, name) for name in _SETTINGS}


def _same_settings(given: argparse.Namespace, folder: Path) -> None:
    """Record the settings of a folder's results; exit if they differ from the recorded ones."""
    file, settings = folder / "settings.json", _settings(given)
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        other = {name: before.get(name) for name in settings if before.get(name) != settings[name]}
        raise SystemExit(f"--out {folder}: its results were made with {other}; give the same, or another folder")


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="failure_cost")
    add_most_others(parser)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=tuple(_PARTS))
    parser.add_argument("--losses", type=int, default=30, help="of each part, with each setting")
    parser.add_argument("--losses-per-run", type=int, default=1)
    parser.add_argument("--settled", type=int, default=6, help="steps of all workers in one plan before a loss")
    parser.add_argument("--seed", type=int, default=0, help="of the workers and moments")
    parser.add_argument(
        "--policy", choices=get_args(PolicyName), default="chameleon", metavar="NAME", help="of emulated and real"
    )
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json")
    parser.add_argument("--time-scale", type=float, default=2.0, help="seconds that a second of the profile takes")
    parser.add_argument(
        "--respawn-delay-s", type=float, default=6.0, help="longer than the step takes that it was lost in"
    )
    parser.add_argument("--creation-s", type=float, default=0.3, help="of a communicator of the pretended library")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for the docs")
    given = parser.parse_args()
    given.profile = given.profile.resolve()
    if given.settled < 3:
        parser.error(f"--settled {given.settled}: should be at least 3, for a median of the time between them")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
