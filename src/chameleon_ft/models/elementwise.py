"""Whether an optimizer updates each element of a parameter by itself, so that workers can divide an update."""

from __future__ import annotations

from typing import Final

import torch

from chameleon_ft.job import Job
from chameleon_ft.models.optimizer import ModelOptimizer

_ELEMENTWISE: Final = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch in which an element depends on its own gradient and state alone. A subclass may add to that."""


def undivided_optimizer(job: Job) -> str:
    """Return the name of the job's optimizer, unless its state can be divided; then it is empty.

    The job says whether it can, or if it does not, the optimizer's class. Raises ConfigError as `ModelOptimizer`.
    """
    if job.elementwise:
        return ""
    kind = type(ModelOptimizer(job).torch)
    return "" if kind in _ELEMENTWISE and job.elementwise is None else kind.__name__
