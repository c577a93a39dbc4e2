"""The log of the library on the command line: lines on standard error from a chosen level on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from chameleon_ft.errors import ConfigError

__all__ = ["LEVELS", "LOG_LEVEL_VARIABLE", "configure_logging", "take_log_level"]

LEVELS: Final = ("debug", "info", "warning", "error")
LOG_LEVEL_VARIABLE: Final = "CHAMELEON_LOG_LEVEL"

_FLAG: Final = "--log-level"
_DEFAULT: Final = "warning"
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler of the command line, told apart from those that a program adds that calls it."""


def take_log_level(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Take `--log-level LEVEL` out of the arguments, wherever it stands.

    Returns:
        The other arguments, and the level: that of the last flag, else that of the environment, else "warning".

    Raises:
        ConfigError: there is no such level.
    """
    level, source = environ.get(LOG_LEVEL_VARIABLE) or _DEFAULT, LOG_LEVEL_VARIABLE
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag == _FLAG:
            level, source = value if equals else next(remaining, ""), _FLAG
        else:
            rest.append(argument)
    if level.lower() not in LEVELS:
        raise ConfigError(f"{source} {level}: should be one of {', '.join(LEVELS)}")
    return rest, level.lower()


def configure_logging(level: str) -> None:
    """Write what the library logs from `level` on to standard error; calling it again replaces the level."""
    logger = logging.getLogger("chameleon_ft")
    for handler in [each for each in logger.handlers if isinstance(each, _StandardError)]:
        logger.removeHandler(handler)
    handler = _StandardError(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
