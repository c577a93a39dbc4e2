"""Options of sbatch that a user adds to the script of a run, and time limits as sbatch reads them."""

from __future__ import annotations

import re
import shlex
from typing import Final

from chameleon_ft.errors import ConfigError

_UNLIMITED: Final = frozenset({"unlimited", "infinite", "-1"})
_TIME: Final = re.compile(
    r"(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(:(?P<s>\d+))?",
    re.ASCII,
)
_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FLAG: Final = re.compile(r"(--[A-Za-z][-A-Za-z0-9]*|-[A-Za-z])(.*)", re.DOTALL)
_ONE_TASK: Final = "a node has one task, its agent, which starts --workers-per-node workers"
_REMEDIES: Final = {
    "--nodes": "give --nodes N to `chameleon slurm`",
    "--ntasks": _ONE_TASK,
    "--ntasks-per-node": _ONE_TASK,
    "--signal": "give --checkpoint-s to `chameleon slurm`",
    "--output": "it goes to a file beside the run directory; give --output-dir for another place",
    "--array": "all nodes of a run are in one job; submit each run of a series, with an --output-dir of its own",
    "--wrap": "the script of the run is what sbatch submits",
    "--test-only": "give --dry-run to `chameleon slurm`, or run sbatch --test-only with the script",
    "--parsable": "`chameleon slurm` prints the number of the job",
}
_LONG: Final = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "--tasks": "--ntasks",
    "--tasks-per-node": "--ntasks-per-node",
    "-o": "--output",
    "-a": "--array",
}


def added_options(options: tuple[str, ...]) -> list[str]:
    """Return further options of sbatch, each as one word.

    Args:
        options: each with its value, as in --partition=gpu, "--partition gpu", "-p gpu" or -pgpu.

    Raises:
        ConfigError: one is no option, or the script needs it as it is.
    """
    return [_word(option.strip()) for option in options]


def _word(option: str) -> str:
    found = _FLAG.fullmatch(option)
    if found is None or not option.isprintable():
        raise ConfigError(f"--sbatch {option!r}: should be an option of sbatch, such as --sbatch=--partition=gpu")
    flag, rest = found.groups()
    if (remedy := _REMEDIES.get(_LONG.get(flag, flag))) is not None:
        raise ConfigError(f"--sbatch={option}: {remedy}")
    value = rest.strip()
    if re.search(r"\s--[A-Za-z]" if rest.startswith("=") else r"(^|\s)--?[A-Za-z]", value):
        raise ConfigError(f"--sbatch={option}: has several options; give each by a --sbatch of its own")
    if not rest[:1].isspace():
        return option
    return f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}"


def time_limit_s(limit: str) -> float | None:
    """Return the seconds of a time limit; None if it is unlimited. Raises ConfigError if sbatch would not read it."""
    if limit.lower() in _UNLIMITED:
        return None
    if (found := _TIME.fullmatch(limit)) is None:
        raise ConfigError(
            f"--time {limit}: should be MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS, or UNLIMITED"
        )
    seconds = sum(int(text) * _SECONDS[unit[-1]] for unit, text in found.groupdict().items() if text)
    return float(seconds) or None  # zero is no limit, too


def quoted(word: str) -> str:
    """Return a word for a line of options: Slurm reads it as a shell does, but for backslashes in quotes."""
    return shlex.quote(word.replace("\\", "\\\\"))
