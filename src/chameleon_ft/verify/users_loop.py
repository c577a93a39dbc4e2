"""A training loop that the user has written, as the judge of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import call_function, load_job
from chameleon_ft.observe import RunDirectory, checkpoint_storage, sound_checkpoint
from chameleon_ft.verify.comparison import StepComparison, WeightComparison, recorded_steps
from chameleon_ft.verify.stored_state import stored_layer

__all__ = ["UsersLoop"]


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
        records = recorded_steps(self._run)
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
        config = self._run.config()
        stored = {
            f"{layer}.{name}": value
            for layer in range(load_job(config.job, config).num_layers)
            for name, value in stored_layer(checkpoints, step, layer)[0].items()
        }
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
