"""Steps of a run beside those of a plain loop, and how far they are from each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import load_job
from chameleon_ft.observe import RunDirectory, StepRecord, checkpoint_storage, is_complete
from chameleon_ft.observe.readable import readable_events, readable_steps
from chameleon_ft.verify.plain_loop import PlainLoop

__all__ = ["TOLERANCES", "StepComparison", "Verification", "WeightComparison", "recorded_steps", "repeat_run"]

TOLERANCES: Final = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest relative deviation of a loss that rounding explains, by precision."""

_OTHERS_FACTOR: Final = 100  # gradient norms and weights amplify rounding: Adam divides by gradients near zero


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step of the run beside the same step of the plain loop."""

    step: int
    loss: float
    plain_loss: float
    grad_norm: float
    plain_grad_norm: float | None
    """None if the loop does not compute it."""

    @property
    def loss_deviation(self) -> float:
        """Relative to the plain loop; infinite if either is not a number."""
        return _deviation(self.loss, self.plain_loss)

    @property
    def grad_norm_deviation(self) -> float | None:
        """Relative to the plain loop; infinite if either is not a number, None if the loop does not compute it."""
        return None if self.plain_grad_norm is None else _deviation(self.grad_norm, self.plain_grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """The weights of a checkpoint beside those of a plain loop after as many steps.

    Attributes:
        step: of the checkpoint.
        deviation: L2 norm of the difference of all weights, relative to the norm of those of the loop.
        worst: name of the tensor with the largest relative deviation of its own.
        worst_deviation: of that tensor.
    """

    step: int
    deviation: float
    worst: str
    worst_deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The deviation of a run from the plain loop."""

    steps: int
    tolerance: float
    max_relative_loss_deviation: float
    max_relative_grad_norm_deviation: float | None
    """None if the loop gives no gradient norms."""
    worst_step: int
    """Step of the largest deviation of the loss."""
    first_step_outside: int | None
    """First step whose loss deviates by more than the tolerance."""
    loop: str = "a plain loop"
    """The judge."""
    weights: WeightComparison | None = None
    weights_left_out: str = ""
    """Why final weights of the judge were not compared."""

    @classmethod
    def of(cls, comparisons: Iterable[StepComparison], *, tolerance: float) -> Verification:
        """Sum up `comparisons`. Raises ConfigError if there are none."""
        found = list(comparisons)
        if not found:
            raise ConfigError("this run has committed no step yet; let it train before it is verified")
        worst = max(found, key=lambda comparison: comparison.loss_deviation)
        outside = [comparison.step for comparison in found if comparison.loss_deviation > tolerance]
        return cls(
            steps=len(found),
            tolerance=tolerance,
            max_relative_loss_deviation=worst.loss_deviation,
            max_relative_grad_norm_deviation=max(
                (each.grad_norm_deviation for each in found if each.grad_norm_deviation is not None), default=None
            ),
            worst_step=worst.step,
            first_step_outside=min(outside, default=None),
        )

    @property
    def outside(self) -> tuple[str, ...]:
        """Parts that deviate by more than rounding explains; for all but the losses, that is 100 times as much."""
        others = {"gradient norm": self.max_relative_grad_norm_deviation or 0.0}
        if self.weights is not None:
            others["weights"] = self.weights.deviation
        return (
            *(("loss",) if self.first_step_outside is not None else ()),
            *(name for name, deviation in others.items() if deviation > _OTHERS_FACTOR * self.tolerance),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, and the parts that deviate."""
        return {**asdict(self), "outside": self.outside}

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps repeated in {self.loop}",
            "largest relative deviation",
            f"  of the loss           {self.max_relative_loss_deviation:.2e}, in step {self.worst_step}",
        ]
        if self.max_relative_grad_norm_deviation is not None:
            lines.append(f"  of the gradient norm  {self.max_relative_grad_norm_deviation:.2e}")
        if (weights := self.weights) is not None:
            lines.append(
                f"  of the weights        {weights.deviation:.2e}, in the checkpoint of step {weights.step}; "
                f"most in {weights.worst}, {weights.worst_deviation:.2e}"
            )
        if self.weights_left_out:
            lines.append(f"weights not compared: {self.weights_left_out}")
        if self.first_step_outside is not None:
            lines.append(f"OUTSIDE the tolerance of {self.tolerance:g}, first in step {self.first_step_outside}")
        elif self.outside:
            others = f"{_OTHERS_FACTOR * self.tolerance:g}"
            lines.append(
                f"{' and '.join(self.outside)} OUTSIDE {others}, {_OTHERS_FACTOR} times the tolerance of losses"
            )
        else:
            lines.append(f"within the tolerance of {self.tolerance:g}")
        return "\n".join(lines)


def repeat_run(run: RunDirectory, *, limit: int | None = None) -> Iterator[StepComparison]:
    """Train the job of `run` from its beginning and yield each committed step, up to `limit` of them.

    A forked run begins with the checkpoint that it was forked from. If a run was resumed with another job, it begins
    with the checkpoint that was read then, because the job before is not there any more.

    Raises ConfigError if the job cannot be loaded, a line of the records is damaged, a step is missing from them, or
    that checkpoint is not there any more.
    """
    config = run.config()
    records = recorded_steps(run)
    events, damaged = readable_events(run)
    if damaged:
        raise ConfigError(damaged[0])
    # In runs of earlier versions the horizon of the learning rate was the number of steps. By time, not by step: a run
    # may go back further than where it was resumed, if that checkpoint is damaged.
    starts = [
        (event["time"], event.get("horizon_steps") or event["steps"]) for event in events if event["event"] == "started"
    ]
    jobs = {
        horizon: load_job(config.job, config.model_copy(update={"horizon_steps": horizon}))
        for horizon in {config.horizon, *(horizon for _, horizon in starts)}
    }
    loop = PlainLoop(config, jobs[config.horizon])
    checkpoints, first = checkpoint_storage(config, run), config.forked.step
    changed = [event for event in events if event["event"] == "job_changed"]
    if changed:
        first, changes = changed[-1]["step"], "; ".join(changed[-1]["changes"])
        if not is_complete(checkpoints, first):
            raise ConfigError(
                f"steps before {first} were trained with another job ({changes}), and the checkpoint of step {first} "
                "is not kept, so no loop can repeat the run; set checkpoint.keep to keep it"
            )
    if config.forked.run or changed:
        loop.load(checkpoints, first)
    for record in records[:limit]:
        if record.is_skipped or record.step < first:  # it has changed nothing, or was trained with another job
            continue
        horizon = next((each for begun_at, each in reversed(starts) if begun_at <= record.time), config.horizon)
        rate = jobs[horizon].learning_rate
        plain_loss, plain_grad_norm = loop.run_step(record.step, None if rate is None else rate(record.step))
        yield StepComparison(
            step=record.step,
            loss=record.loss,
            plain_loss=plain_loss,
            grad_norm=record.grad_norm,
            plain_grad_norm=plain_grad_norm,
        )


def recorded_steps(run: RunDirectory) -> list[StepRecord]:
    """Return the last record of each step in order. Raises ConfigError if one is missing or a line is damaged."""
    records, damaged = readable_steps(run)
    if damaged:
        raise ConfigError(damaged[0])
    last = {record.step: record for record in records}
    ordered = [last[step] for step in sorted(last)]
    for number, record in enumerate(ordered, run.config().forked.step):
        if record.step != number:
            raise ConfigError(f"metrics.jsonl has no record of step {number}, but later ones; the file is damaged")
    return ordered


def _deviation(value: float, plain: float) -> float:
    if not (math.isfinite(value) and math.isfinite(plain)):
        return math.inf
    if value == plain:
        return 0.0
    return abs(value - plain) / abs(plain) if plain else math.inf
