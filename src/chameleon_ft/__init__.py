"""Chameleon: train large language models with PyTorch, and keep training when workers fail.

The names below are loaded when they are first used, so that importing the package costs next to nothing and does not
import torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chameleon_ft.config import RunConfig, TrainConfig
    from chameleon_ft.errors import ChameleonError, ConfigError
    from chameleon_ft.job.job import Job
    from chameleon_ft.session.session import Callback, EarlyStop, Session, load_checkpoint
    from chameleon_ft.side_outputs import auxiliary_loss, log
    from chameleon_ft.trees import BoundarySpec
    from chameleon_ft.weights import Pieces, Weights

__all__ = [
    "BoundarySpec",
    "Callback",
    "ChameleonError",
    "ConfigError",
    "EarlyStop",
    "Job",
    "Pieces",
    "RunConfig",
    "Session",
    "TrainConfig",
    "Weights",
    "__version__",
    "auxiliary_loss",
    "load_checkpoint",
    "log",
]

__version__ = "0.1.0"

# The library logs to children of this logger. A program that uses it chooses the handlers; the command line has one.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "BoundarySpec": "trees",
    "Callback": "session.session",
    "ChameleonError": "errors",
    "ConfigError": "errors",
    "EarlyStop": "session.session",
    "Job": "job.job",
    "Pieces": "weights",
    "RunConfig": "config",
    "Session": "session.session",
    "TrainConfig": "config",
    "Weights": "weights",
    "auxiliary_loss": "side_outputs",
    "load_checkpoint": "session.session",
    "log": "side_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
