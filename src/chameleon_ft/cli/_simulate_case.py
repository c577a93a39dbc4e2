"""From the arguments of `chameleon simulate` to what is simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery.policies import current_name
from chameleon_ft.simulate import MODELS, Trace, generate_trace, load_trace, load_trace_for
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import SIMULATED_POLICIES
from chameleon_ft.simulate.sweep import SWEPT

__all__ = ["TraceChoice", "assumed", "chosen_policies", "chosen_sweep", "names_only_failing", "trace_of"]

_DAY_S = 86_400.0
_YEAR_DAYS = 365.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """Which trace, and what is made of it; None where nothing is said."""

    path: Path | None
    generate: str | None
    nodes: int | None
    days: float | None
    seed: int
    rate: float
    keep_repairs: bool


def trace_of(choice: TraceChoice, *, hosts: int, workers_per_host: int) -> Trace:
    """The trace for a cluster, at its rate and of its length.

    Raises ConfigError with what to change.
    """
    for flag, value in (("--rate", choice.rate), ("--days", choice.days)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} {value:g}: should be a number above 0")
    if choice.path is not None:
        if choice.generate is not None:
            raise ConfigError(f"--generate {choice.generate}: {choice.path} is the trace; leave one of them out")
        trace = _read(choice.path, hosts, workers_per_host, choice.nodes)
        trace = _at_rate(trace, choice)
        return trace if choice.days is None else trace.limited(choice.days * _DAY_S)
    if choice.generate is None:
        raise ConfigError(f"nothing happens: give a --trace, or --generate {'|'.join(MODELS)}")
    if choice.nodes is not None:
        raise ConfigError(
            f"--nodes {choice.nodes}: is for a --trace that names only the nodes that failed; leave it out"
        )
    days = choice.days or _YEAR_DAYS
    # Compressed it is as long as was asked for.
    drawn_s = days * _DAY_S * (1.0 if choice.keep_repairs else choice.rate)
    model = MODELS[choice.generate]
    trace = generate_trace(model, hosts=hosts, workers_per_host=workers_per_host, duration_s=drawn_s, seed=choice.seed)
    return _at_rate(trace, choice)


def _at_rate(trace: Trace, choice: TraceChoice) -> Trace:
    if choice.keep_repairs:
        return trace.scaled(choice.rate, seed=choice.seed)
    return trace.compressed(choice.rate)


def _read(path: Path, hosts: int, workers_per_host: int, nodes: int | None) -> Trace:
    if nodes is None and names_only_failing(path):
        named = load_trace(path).hosts
        if hosts < named:
            raise ConfigError(
                f"--trace {path}: names {named} nodes that failed, more than the {hosts} hosts that are asked for, and "
                "not those that never did; say by --nodes on how many it was measured, for its rate"
            )
    return load_trace_for(path, hosts=hosts, workers_per_host=workers_per_host, nodes=nodes)


def names_only_failing(path: Path) -> bool:
    """Whether a file is a list of faults, as InfiniteHBD's; what cannot be read is told by whoever reads it."""
    try:
        with path.open("rb") as file:
            return file.read(200).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError:
        return False


def chosen_policies(text: str) -> tuple[str, ...]:
    """The policies that are named, or all. Raises ConfigError for one that is named twice, or none."""
    if text == "all":
        return SIMULATED_POLICIES
    names = tuple(current_name(name.strip()) for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"--policies {text!r}: name some of {', '.join(SIMULATED_POLICIES)}, or all")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--policies {text}: names {name} twice")
    return names


def chosen_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """What is varied, and the values. Raises ConfigError where the text does not say."""
    name, _, values = text.partition("=")
    numbers = _numbers(values.split(","))
    if name not in SWEPT or not numbers:
        raise ConfigError(f"--sweep {text}: should be {'|'.join(SWEPT)}=VALUE,VALUE,..., such as rate=0.1,1,10,30")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--sweep {text}: has a value twice")
    return name, numbers


def assumed(text: str, parameters: Parameters = Parameters()) -> Parameters:  # noqa: B008 - frozen
    """The parameters, with those that the text gives. Raises ConfigError for a name or a value that there is not."""
    names = [each.name for each in fields(Parameters)]
    kinds = get_type_hints(Parameters)
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        numbers = _numbers([value])
        if name.strip() not in names or not numbers or (kinds[name.strip()] is int and numbers[0] != int(numbers[0])):
            raise ConfigError(f"--assume {part}: should be NAME=NUMBER, with a name of {', '.join(names)}")
        given[name.strip()] = int(numbers[0]) if kinds[name.strip()] is int else numbers[0]
    change: Callable[..., Parameters] = replace
    return change(parameters, **given)


def _numbers(texts: Sequence[str]) -> tuple[float, ...]:
    """The numbers, or none if one of the texts is not a finite one."""
    try:
        found = tuple(float(text) for text in texts)
    except ValueError:
        return ()
    return found if all(math.isfinite(value) for value in found) else ()
