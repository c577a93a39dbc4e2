"""Whether an optimizer updates each element of a parameter by itself, so that workers can divide an update."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import Job

__all__ = ["small_optimizer", "undivided_optimizer"]

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

    The job says whether it can, or if it does not, the optimizer's class. Raises ConfigError if that is no optimizer.
    """
    if job.elementwise:
        return ""
    optimizer = small_optimizer(job, nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2)))
    kind = type(optimizer)
    return "" if kind in _ELEMENTWISE and job.elementwise is None else kind.__name__


def small_optimizer(job: Job, matrix: nn.Parameter, vector: nn.Parameter) -> torch.optim.Optimizer:
    """Return an optimizer of two parameters, or of the matrix alone if it takes no vectors.

    Raises ConfigError if it is none.
    """
    try:
        optimizer: object = job.optimizer([matrix, vector])
    except ValueError:  # of torch.optim.Muon, for example
        optimizer = job.optimizer([matrix])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"`optimizer` returned {type(optimizer).__name__}: it returns a torch.optim.Optimizer of the parameters"
        )
    return optimizer
