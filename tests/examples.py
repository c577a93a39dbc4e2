"""Numbers of examples that tests draw."""

from __future__ import annotations

from hypothesis import settings

_LEAST = 10


def examples(count: int) -> int:
    """Return how many examples a test draws: `count` if they are drawn anew, by `make explore`; otherwise a third.

    Without it all runs draw the same ones, and a third of them fails for most of the faults that all of them find.
    """
    return count if settings.get_current_profile_name() == "explore" else max(_LEAST, -(-count // 3))
