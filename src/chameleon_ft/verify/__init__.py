"""The judges of a run: a plain PyTorch loop of its job, or one that the user has written."""

from __future__ import annotations

from chameleon_ft.verify.comparison import TOLERANCES, StepComparison, Verification, WeightComparison, repeat_run
from chameleon_ft.verify.users_loop import UsersLoop

__all__ = ["TOLERANCES", "StepComparison", "UsersLoop", "Verification", "WeightComparison", "repeat_run"]
