"""The command line: one module per command, imported when that command is called."""

from __future__ import annotations

from chameleon_ft.cli.main import main

__all__ = ["main"]
