"""The command `chameleon`: finds the module of a command, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

import chameleon_ft
from chameleon_ft.cli._logging import LEVELS, LOG_LEVEL_VARIABLE, configure_logging, take_log_level
from chameleon_ft.errors import ChameleonError, CheckpointError, ConfigError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "train": "Train the Llama that comes with Chameleon, all on this machine.",
    "run": "Train a model of your own, all on this machine.",
    "coordinator": "Run the coordinator of a run that spans several machines.",
    "agent": "Start and watch this machine's workers of such a run.",
    "worker": "Be one worker of such a run, started by a cluster's own launcher.",
    "profile": "Measure what layers, operations and links cost on this machine, or derive it for a known one.",
    "plan": "Predict what a step takes, in time and memory, before anything runs.",
    "simulate": "Let policies live through months of failures, and set side by side what they train.",
    "report": "Lay the measured operations of a run over the predicted ones.",
    "explain": "Retell each decision of a run: what was known, weighed, predicted and measured.",
    "inject": "Make a worker of a live run fail.",
    "verify": "Repeat a run in one plain PyTorch loop and compare the losses.",
}

_logger = logging.getLogger(__name__)

# Old names, kept for one release.
_ALIASES = {"supervise": "agent"}

_USER_ERROR = 2
_FAILURE = 1
_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 input that cannot be used, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, level = take_log_level(arguments, os.environ)
    except ConfigError as error:
        print(f"chameleon: {error}", file=sys.stderr)
        return _USER_ERROR
    if not arguments:
        print(_help(), file=sys.stderr)
        return _USER_ERROR
    configure_logging(level)
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"chameleon {chameleon_ft.__version__}")
        return 0
    if name in _ALIASES:
        _logger.warning("chameleon %s is deprecated, and gone in the next release; use %s", name, _ALIASES[name])
        name = _ALIASES[name]
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return _USER_ERROR
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"chameleon_ft.cli.{name}")
    try:
        code: int = module.main(arguments)
    except (ConfigError, CheckpointError) as error:
        print(f"chameleon {name}: {error}", file=sys.stderr)
        return _USER_ERROR
    except ChameleonError as error:
        print(f"chameleon {name}: {error}", file=sys.stderr)
        return _FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has had enough. The interpreter flushes once more at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    except Exception as error:  # noqa: BLE001
        print(f"chameleon {name}: {type(error).__name__}: {error}; the details are in {_log(name)}", file=sys.stderr)
        return _FAILURE
    return code


def _log(name: str) -> str:
    """Write down the error that is being handled, which nobody has foreseen, and return where."""
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"chameleon-{name}-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exc(file=file)
    return file.name


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: chameleon COMMAND [--log-level LEVEL] [ARGUMENT ...]",
            "",
            "Train large language models with PyTorch, and keep training when workers fail.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
            "",
            f"--log-level {{{','.join(LEVELS)}}}, or the environment variable {LOG_LEVEL_VARIABLE}: what is logged to",
            "standard error, beside what a command prints and records. The default is warning.",
            "",
            "`chameleon COMMAND --help` explains a command; `chameleon --version` prints the version.",
        ]
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"chameleon: there is no command {name!r}; {hint}"
