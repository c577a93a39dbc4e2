"""Errors of the ranks' own code: whose they are."""

from __future__ import annotations

from chameleon_ft.control.state.members import Worker

__all__ = ["Crashes"]


class Crashes:
    """Tells the error of one worker, which can be done without, from one that every other would run into as well."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, str]] = {}  # step -> the worker that was ended by an error in it, and that

    def is_everyones(self, worker: Worker, error: str, *, step: int) -> bool:
        """Whether to go on without a worker is of no use: in step 0, or where another one has ended of the same.

        A worker that has come in this step proves nothing: what it lacks, the others may have.

        Args:
            step: the one that is being run.
        """
        if not worker.takes_part or (step > 0 and (worker.first_step or 0) >= step):
            return False
        other, known = self._known.get(step, (worker.id, error))
        self._known[step] = worker.id, error
        return step == 0 or (known == error and other != worker.id)
