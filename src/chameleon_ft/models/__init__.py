"""Models as lists of layers, and how a job's layers are built, seeded and measured.

Importing this package loads no torch; its modules do.
"""

from __future__ import annotations

__all__: list[str] = []
