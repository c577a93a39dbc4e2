"""How far a simulation is, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from chameleon_ft.simulate.run import ORACLE

__all__ = ["Progress"]


class Progress:
    """A bar on standard error while it is a terminal, gone when all is done."""

    def __init__(self, policies: Sequence[str], swept: str = "", values: Sequence[float] = (0.0,)) -> None:
        self._policies = [policy for policy in policies if policy != ORACLE] or list(policies)
        self._swept = swept
        self._values = sorted(values)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("planning", total=len(self._policies) * len(self._values))
        self._furthest = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def of_policy(self, policy: str, share: float) -> None:
        """A policy has lived through this share of the trace."""
        self._show(0, policy, policy, share)

    def of_value(self, value: float, policy: str, share: float) -> None:
        """The same, at a value of a sweep."""
        self._show(self._values.index(value), policy, f"{self._swept} {value:g}: {policy}", share)

    def _show(self, point: int, policy: str, words: str, share: float) -> None:
        done = point * len(self._policies) + self._policies.index(policy) + share
        # A policy may be simulated twice, from pipelines of two depths.
        self._furthest = max(self._furthest, done)
        self._bar.update(self._task, completed=self._furthest, description=words)
