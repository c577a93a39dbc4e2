"""The command `chameleon`: loads and runs a command, configures the log, and turns errors into exit codes."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn, TextIO

import chameleon_ft
from chameleon_ft.errors import ChameleonError, CheckpointError, ConfigError, LiveRunError
from chameleon_ft.host.fork_server import Terminated, terminations

_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "train on this machine": {
        "train": "Train the built-in Llama.",
        "run": "Train a model of your own.",
    },
    "train on several machines": {
        "coordinator": "Coordinate a run: decide, record and display.",
        "agent": "Start and watch the workers of a run on this machine.",
        "worker": "Run one worker of a run, started by a cluster's own launcher.",
        "preflight": "Examine this machine as a run does before it admits a host.",
        "slurm": "Submit a run to Slurm.",
        "kubernetes": "Write the manifests of a run on Kubernetes.",
        "ray": "Train on the nodes of a Ray cluster.",
    },
    "predict": {
        "profile": "Measure the costs of layers, operations and links, or derive them for a known device.",
        "plan": "Predict the time and memory of a step before anything runs.",
        "simulate": "Compare policies over months of simulated failures.",
    },
    "prepare data": {
        "data": "Tokenise a corpus, or look at one.",
    },
    "look at a run, live or over": {
        "status": "Show its state: progress, pace, workers, failures, checkpoints, expected end.",
        "watch": "Show its state and its newest events until it is over.",
        "page": "Serve its page for browsers, and its metrics.",
        "track": "Hand its records to TensorBoard, trackers (W&B, MLflow, Trackio), OpenTelemetry or a webhook.",
        "diagnose": "Show for each incident which worker failed, where and why, and what was done.",
        "explain": "Show each decision: the candidates, the reason and the outcome.",
        "report": "Compare the measured steps with the predicted ones.",
        "verify": "Repeat it in one plain PyTorch loop and compare the losses.",
        "export": "Write the weights of a checkpoint as safetensors, or for torch.",
    },
    "act on a live run": {
        "checkpoint": "Write a checkpoint now, or keep one.",
        "evaluate": "Evaluate its held-out samples now.",
        "drain": "Take workers out before their machine leaves.",
        "stop": "End the run, with a checkpoint.",
        "inject": "Inject a failure, to watch the run recover.",
    },
}
COMMANDS: Final = {name: text for commands in _GROUPS.values() for name, text in commands.items()}

_LEVELS: Final = ("debug", "info", "warning", "error")
_LEVEL_FLAG: Final = "--log-level"
_LEVEL_VARIABLE: Final = "CHAMELEON_LOG_LEVEL"

_FAILURE: Final = 1
_USER_ERROR: Final = 2
# A shell reports this code for a process that SIGINT ended.
_INTERRUPTED: Final = 130

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 unusable input, 75 resume it, 130 interrupted.

    Without `argv`, the command is this process: once its exit code is known, no SIGTERM and no SIGHUP changes that.
    """
    if argv is not None:
        return _main(argv)
    with _exit_code_kept():
        return _main(sys.argv[1:])


@contextmanager
def _exit_code_kept() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process with EX_TEMPFAIL, and ignore them after the block.

    Python's handlers are gone before the process ends, but a signal that is ignored stays so. A run that trains handles
    these signals itself.
    """
    numbers = terminations()
    for number in numbers:
        signal.signal(number, _terminate)
    # Clusters send them as warnings, and processes that this one starts inherit that: none ends by its default action.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _main(argv: Sequence[str]) -> int:
    try:
        arguments, level = take_log_level(argv, os.environ)
    except ConfigError as error:
        print(f"chameleon: {error}", file=sys.stderr)
        return _USER_ERROR
    if not arguments:
        print(_help(), file=sys.stderr)
        return _USER_ERROR
    _configure_logging(level)
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"chameleon {chameleon_ft.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"chameleon: there is no command {name!r}; {hint}", file=sys.stderr)
        return _USER_ERROR
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        module = importlib.import_module(f"chameleon_ft.cli.commands.{name}")
        code: int = module.main(arguments)
    except ChameleonError as error:
        print(f"chameleon {name}: {error}", file=sys.stderr)
        if isinstance(error, LiveRunError):
            return os.EX_UNAVAILABLE
        return _USER_ERROR if isinstance(error, ConfigError | CheckpointError) else _FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it. The interpreter flushes once more at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    except Exception as error:  # noqa: BLE001
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"chameleon-{name}-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            traceback.print_exc(file=log)
        text = f"{type(error).__name__}: {error}; the details are in {log.name}"
        print(f"chameleon {name}: {text}", file=sys.stderr)
        return _FAILURE
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(
        "\n".join((f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in group.items()), ""))
        for title, group in _GROUPS.items()
    )
    return f"""\
usage: chameleon COMMAND [--log-level LEVEL] [ARGUMENT ...]

Train large language models with PyTorch, and keep training when workers fail.

{commands}
--log-level {{{",".join(_LEVELS)}}}, or the environment variable {_LEVEL_VARIABLE}, sets what is logged to
standard error, beside what a command prints and records. The default is warning.

`chameleon COMMAND --help` explains a command; `chameleon --version` prints the version."""


class _StandardError(logging.StreamHandler[TextIO]):
    """The handler of the command line, told apart from those that a calling program adds."""


def take_log_level(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Take `--log-level LEVEL` out of the arguments, anywhere among them.

    Returns:
        The other arguments, and the level: that of the last flag, else that of the environment, else "warning".

    Raises:
        ConfigError: there is no such level.
    """
    level, source = environ.get(_LEVEL_VARIABLE) or "warning", _LEVEL_VARIABLE
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag == _LEVEL_FLAG:
            level, source = value if equals else next(remaining, ""), _LEVEL_FLAG
        else:
            rest.append(argument)
    if level.lower() not in _LEVELS:
        raise ConfigError(f"{source} {level}: should be one of {', '.join(_LEVELS)}")
    return rest, level.lower()


def _configure_logging(level: str) -> None:
    """Log the library to standard error from `level` on; a second call replaces the level."""
    logger = logging.getLogger("chameleon_ft")
    logger.handlers[:] = [each for each in logger.handlers if not isinstance(each, _StandardError)]
    handler = _StandardError(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
