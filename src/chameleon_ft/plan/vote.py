"""The vote by which the ranks of a generation agree at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The sums of a step's vote, with which any rank can apply that step.

    Attributes:
        grad_square_sum: squared L2 norm of the summed, not yet averaged, gradient of the whole model.
        loss_sum: the loss of the global batch before it is divided, with the auxiliary losses.
        terms: loss terms of the global batch; the gradient and the loss are divided by it.
        samples: samples of the global batch.
        finish: Some rank has received `Finish`: the run ends after this step.
        switch: Some rank has received `Switch`: the next generation follows.
        checkpoint: All ranks write a checkpoint after this step.
        skipped: The step is bad or empty, and no rank changes anything; then the sums are 0.
        empty: The step is skipped because it has no loss terms.
        snapshot: All ranks take a snapshot after this step.
        data_wait_s: seconds in which the slowest of the ranks read samples.
        checked: The state before the step was compared between the holders of each layer, and agreed.
        evaluate: All ranks evaluate the state after this step; if another generation follows, at its beginning.
        auxiliary_sum: the auxiliary losses of layers, before they are divided.
        logged: the means of what layers have logged, by name; None if it is no finite number.
    """

    grad_square_sum: float
    loss_sum: float
    terms: float
    samples: int
    finish: bool
    switch: bool = False
    checkpoint: bool = False
    skipped: bool = False
    empty: bool = False
    snapshot: bool = False
    data_wait_s: float = 0.0
    checked: bool = False
    evaluate: bool = False
    auxiliary_sum: float = 0.0
    logged: tuple[tuple[str, float | None], ...] = ()

    @property
    def evaluates(self) -> bool:
        """Whether ranks evaluate the state after this step: not at an end that was asked for."""
        return self.evaluate and not self.finish

    @property
    def takes_snapshot(self) -> bool:
        """Whether ranks begin a snapshot: not if another generation follows, or the end."""
        return self.snapshot and not self.switch and not self.finish
