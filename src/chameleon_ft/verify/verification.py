"""Comparing the steps of a run, and its weights, with those of a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import JobChanged, SampleLeftOut
from chameleon_ft.events.records import Started, StepRecord
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import call_function, load_job
from chameleon_ft.storage.checkpoints import is_complete, sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage
from chameleon_ft.verify.plain_loop import PlainLoop
from chameleon_ft.verify.stored_state import stored_weights

TOLERANCES: Final = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest relative deviation of a loss that rounding explains, by precision."""

# Gradient norms and weights amplify rounding: Adam divides by gradients near zero.
_OTHERS_FACTOR: Final = 100


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
        step: The step of the checkpoint.
        deviation: L2 norm of the difference of all weights, relative to the norm of those of the loop.
        worst: name of the tensor with the largest relative deviation of its own.
        worst_deviation: The relative deviation of that tensor.
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


def repeat_run(
    run: RunDirectory, *, limit: int | None = None, loop_of: Callable[[RunConfig, Job], PlainLoop] | None = None
) -> Iterator[StepComparison]:
    """Train the job of `run` from its beginning and yield each committed step, up to `limit` of them.

    `loop_of` makes the plain loop.

    A forked run begins with the checkpoint that it was forked from. If a run was resumed with another job, it begins
    with the checkpoint that was read then, because the job before is not there any more.

    Raises ConfigError if the job cannot be loaded, a line of the records is damaged, a step is missing from them, or
    that checkpoint is not there any more.
    """
    config = run.config()
    records = _recorded_steps(run)
    events, damaged = run.readable_events()
    if damaged:
        raise ConfigError(damaged[0])
    # In runs of earlier versions the horizon of the learning rate was the number of steps. By time, not by step: a run
    # may go back further than where it was resumed, if that checkpoint is damaged.
    starts = [(event.time, event.horizon_steps or event.steps) for event in events if isinstance(event, Started)]
    jobs = {
        horizon: load_job(config.job, config.model_copy(update={"horizon_steps": horizon}))
        for horizon in {config.horizon, *(horizon for _, horizon in starts)}
    }
    loop = (loop_of or PlainLoop)(config, jobs[config.horizon])
    checkpoints, first = checkpoint_storage(config, run), config.forked.step
    changed = [event for event in events if isinstance(event, JobChanged)]
    if changed:
        first, changes = changed[-1].step, "; ".join(changed[-1].changes)
        if not is_complete(checkpoints, first):
            raise ConfigError(
                f"steps before {first} were trained with another job ({changes}), and the checkpoint of step {first} "
                "is not kept, so no loop can repeat the run; set checkpoint.keep to keep it"
            )
    if config.forked.run or changed:
        loop.load(checkpoints, first)
    loop.leave_out((event.epoch, event.sample) for event in events if isinstance(event, SampleLeftOut))
    for record in records[:limit]:
        # The step has changed nothing, or was trained with another job.
        if record.is_skipped or record.step < first:
            continue
        horizon = next((each for begun_at, each in reversed(starts) if begun_at <= record.time), config.horizon)
        plain = loop.run_step(record.step, jobs[horizon])
        yield StepComparison(
            step=record.step,
            loss=record.loss,
            plain_loss=plain.loss,
            grad_norm=record.grad_norm,
            plain_grad_norm=plain.grad_norm,
        )


def _recorded_steps(run: RunDirectory) -> list[StepRecord]:
    """Return the last record of each step in order. Raises ConfigError if one is missing or a line is damaged."""
    records, damaged = run.readable_steps()
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


class UsersLoop:
    """A generator that yields the loss of each step, or its loss and gradient norm, and may end with the weights.

    It yields one value for each step of the run, also of one that the run skipped, which is not compared. After the
    last it may return, or yield, the state dict of the whole model, with the names of `nn.Sequential(*layers)`:
    "LAYER.NAME" for each parameter and persistent buffer.

    Args:
        reference: ``path/to/file.py:function`` or ``package.module:function``; without ``:function`` it is ``loop``.
            The function gets the run's configuration if it requires an argument.
    """

    def __init__(self, run: RunDirectory, reference: str) -> None:
        self._run = run
        self.reference = reference
        self.weights: WeightComparison | None = None
        self.weights_left_out = ""
        """Why the weights were not compared; empty if they were, or if the loop has returned none."""

    def compare(self, *, limit: int | None = None) -> Iterator[StepComparison]:
        """Run the loop beside the records of the run, up to `limit` steps, and then compare the weights.

        Raises:
            ConfigError: there is no such function, it yields too few values or something else than numbers, or the
                weights do not fit the model. Errors of the function itself pass through.
        """
        records = _recorded_steps(self._run)
        loop = call_function(self.reference, self._run.config(), kind="loop")
        if not isinstance(loop, Iterator):
            raise self._error(f"its function returned {type(loop).__name__}; let it yield the loss of each step")
        for number, record in enumerate(records[:limit]):
            try:
                value = next(loop)
            except StopIteration:
                raise self._error(
                    f"it yielded {number} losses, but the run has {len(records)} steps; let it train as many, or "
                    f"compare only those by --steps {number}"
                ) from None
            if record.is_skipped:
                continue
            loss, grad_norm = self._numbers(value, record.step)
            yield StepComparison(
                step=record.step,
                loss=record.loss,
                plain_loss=loss,
                grad_norm=record.grad_norm,
                plain_grad_norm=grad_norm,
            )
        if limit is not None and limit < len(records):
            self.weights_left_out = f"only the first {limit} of {len(records)} steps were repeated"
        elif records:
            self._compare_weights(loop, records[-1].step + 1)

    def _numbers(self, value: Any, step: int) -> tuple[float, float | None]:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        try:
            if len(parts) > 2:
                raise TypeError
            loss, *others = (float(part.detach() if isinstance(part, torch.Tensor) else part) for part in parts)
        except (TypeError, ValueError, RuntimeError):
            raise self._error(
                f"for step {step} it yielded {type(value).__name__} {value!r:.60}; yield the loss as a number, or the "
                "loss and the gradient norm"
            ) from None
        if not all(map(math.isfinite, (loss, *others))):
            raise self._error(f"for step {step} it yielded {value!r:.60}, which cannot be compared")
        return loss, others[0] if others else None

    def _compare_weights(self, loop: Iterator[Any], step: int) -> None:
        """Compare the weights that the loop ends with, if it does, with those of the newest checkpoint."""
        try:
            weights = next(loop)
        except StopIteration as end:
            weights = end.value
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            self.weights_left_out = f"the loop goes on after the {step} steps of the run"
            return
        checkpoints = checkpoint_storage(self._run.config(), self._run)
        newest, _ = sound_checkpoint(checkpoints)
        if newest != step:
            found = "no checkpoint" if newest is None else f"its newest checkpoint is that of step {newest}"
            self.weights_left_out = f"the run has {step} steps, and {found}"
            return
        stored = stored_weights(self._run.config(), checkpoints, step)
        self.weights = self._weight_comparison(step, weights, stored)

    def _weight_comparison(
        self, step: int, weights: Mapping[str, Any], stored: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        names = sorted(weights.keys() ^ stored.keys())
        if names:
            which = "the run" if names[0] in weights else "the loop"
            raise self._error(
                f"{which} has no weights {names[0]!r}; return nn.Sequential(*layers).state_dict(), whose names are "
                f"such as {min(stored)!r}"
            )
        squares = dict[str, tuple[float, float]]()
        for name, value in weights.items():
            if not isinstance(value, torch.Tensor) or value.shape != stored[name].shape:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise self._error(f"its weights {name!r} are {shape}, those of the run {tuple(stored[name].shape)}")
            own = value.detach().to("cpu", torch.float64)
            squares[name] = float((stored[name].double() - own).square().sum()), float(own.square().sum())
        relative = {name: _relative(*both) for name, both in squares.items()}
        worst = max(relative, key=relative.__getitem__)
        whole = _relative(*(math.fsum(column) for column in zip(*squares.values(), strict=True)))
        return WeightComparison(step=step, deviation=whole, worst=worst, worst_deviation=relative[worst])

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"loop {self.reference!r}: {problem}")


def _relative(difference: float, size: float) -> float:
    """Return the ratio of two norms from their squares; infinite if a difference is not a number."""
    if not difference:
        return 0.0
    return math.sqrt(difference / size) if math.isfinite(difference) and size else math.inf
