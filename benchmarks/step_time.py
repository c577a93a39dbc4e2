"""What does fault tolerance cost while nothing fails? The step time beside torch's own pipeline schedule.

Both systems train the same model in the same layout, with the same micro-batches, samples and optimizer, in as many
processes over gloo with one compute thread each: chameleon, and torch.distributed.pipelining's Schedule1F1B with an
all-reduce of the gradients, started by torchrun. Their runs alternate. A step is timed from one update to the next,
each taken at the last worker, by stamps in the model that both train. The losses must agree, or the comparison is
refused. With --optimizer-redundancy, the runs are compared that share the optimizer's state and those that do not; with
--compile, those with compiled layers and those without; with --transformers, those of transformers' Llama and of the
built-in one, of the same shape and initial weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW

from benchmarks import _chameleon, _torchrun
from benchmarks._common import Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from benchmarks._stamped_job import read_stamps
from chameleon_ft.config import TrainConfig
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_layer
from chameleon_ft.models.llama import llama_layers, llama_weights, next_token_loss
from chameleon_ft.weights import SINGLE

_LARGEST_RATIO = 1.05
_LARGEST_RATIO_OF_VARIANTS = 1.03
_LARGEST_LOSS_DEVIATION = 1e-5


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of one system."""

    steps_s: tuple[float, ...]
    """Times from each update to the next, without the warm-up."""
    losses: tuple[float, ...]


_Measure = Callable[[TrainConfig, argparse.Namespace, Path], _Run]


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    config = base_config(given.config, steps=given.warmup + given.steps + 1)
    systems: dict[str, _Measure] = {"chameleon": _run_chameleon, "Schedule1F1B and all-reduce": _run_torch}
    if given.optimizer_redundancy is not None:
        owners = config.parallel.model_copy(update={"optimizer_redundancy": given.optimizer_redundancy})
        shared = config.model_copy(update={"parallel": owners})
        systems = {"shared": lambda _, given, path: _run_chameleon(shared, given, path), "whole": _run_chameleon}
    if given.compile:
        own = config.model_copy(update={"compile": "static"})
        systems = {"compiled": lambda _, given, path: _run_chameleon(own, given, path), "eager": _run_chameleon}
    if given.transformers:
        adapted = _with_transformers(config, folder / "model")
        systems = {
            "transformers": lambda _, given, path: _run_chameleon(adapted, given, path),
            "built-in": _run_chameleon,
        }
    runs: dict[str, list[_Run]] = {name: [] for name in systems}
    for number in range(given.rounds):
        # Each goes first in every other round, so that neither gains from slow changes of the machine.
        for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
            progress(f"round {number + 1} of {given.rounds}: {name}")
            measure = partial(systems[name], config, given)
            runs[name].append(neighbours.undisturbed(measure, folder / f"{name.split()[0]}-{number}"))
        _require_equal_losses(*(own[-1] for own in runs.values()))
    is_plain = given.optimizer_redundancy is None and not given.transformers
    largest = _LARGEST_RATIO if is_plain else _LARGEST_RATIO_OF_VARIANTS
    return _report(runs, neighbours, largest).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="step_time")
    add_most_others(parser)
    variants = parser.add_mutually_exclusive_group()
    variants.add_argument(
        "--optimizer-redundancy", type=int, metavar="OWNERS", help="compare sharing among so many owners with none"
    )
    variants.add_argument("--compile", action="store_true", help="compare compiled layers with others")
    variants.add_argument("--transformers", action="store_true", help="compare transformers' Llama with the built-in")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not")
    return parser.parse_args()


def _with_transformers(config: TrainConfig, folder: Path) -> TrainConfig:
    """Write the model that a run begins with as one of transformers, and return the configuration that trains it."""
    folder.mkdir()
    weights = llama_weights(config.model)
    job = Job(
        layers=llama_layers(config.model),
        loss=next_token_loss,
        loss_terms=Tensor.numel,
        dataset=range(1),
        optimizer=AdamW,
        weights=weights,
    )
    layers = [build_layer(job, layer, config.seed).state_dict() for layer in range(job.num_layers)]
    save_file(
        {str(job.stored_as(n, name)): value for n, state in enumerate(layers) for name, value in state.items()},
        folder / SINGLE,
    )
    assert weights.save_config is not None
    weights.save_config(folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"hf": str(folder)})})


def _run_chameleon(config: TrainConfig, given: argparse.Namespace, path: Path) -> _Run:
    run = _chameleon.train(config, run=path, timeout_s=given.timeout)
    return _Run(_steps_s(path, given.warmup), tuple(step.loss for step in run.steps()))


def _run_torch(config: TrainConfig, given: argparse.Namespace, path: Path) -> _Run:
    _torchrun.train(config, out=path, timeout_s=given.timeout)
    return _Run(_steps_s(path, given.warmup), tuple(_torchrun.losses_of(path, config)))


def _steps_s(run: Path, warmup: int) -> tuple[float, ...]:
    """Return the time from each step's update to the next one's, each taken at the last worker."""
    updates: dict[int, float] = {}
    for stamp in read_stamps(run):
        if stamp.step is not None:
            updates[stamp.step] = stamp.time  # stamps are ordered by time
    return tuple(later - earlier for earlier, later in pairwise(updates[step] for step in sorted(updates)))[warmup:]


def _require_equal_losses(one: _Run, other: _Run) -> None:
    worst = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    if worst > _LARGEST_LOSS_DEVIATION:
        raise SystemExit(f"the losses of the two systems deviate by {worst:.1e}: they did not train the same")


def _report(runs: dict[str, list[_Run]], neighbours: Neighbours, largest_ratio: float) -> Report:
    ours, theirs = (Spread(tuple(step for run in own for step in run.steps_s)) for own in runs.values())
    ratios = Spread(tuple(median(a.steps_s) / median(b.steps_s) for a, b in zip(*runs.values(), strict=True)))
    ratio = ours.median / theirs.median
    return Report(
        benchmark="step_time",
        columns=("", "number", "median (least to largest)"),
        rows=(
            *(
                (f"{name}: step, s", f"{len(own.values)} steps", own.shown())
                for name, own in zip(runs, (ours, theirs), strict=True)
            ),
            ("ratio of the two medians of a round", f"{len(ratios.values)} rounds", ratios.shown()),
        ),
        bars=(Bar(name=f"median step, {' over '.join(runs)}", value=ratio, limit=largest_ratio),),
        results={
            "step_s": {name: own.to_json() for name, own in zip(runs, (ours, theirs), strict=True)},
            "ratio_of_medians": ratio,
            "ratio_by_round": ratios.to_json(),
        },
        neighbours=neighbours,
    )


if __name__ == "__main__":
    raise SystemExit(main())
