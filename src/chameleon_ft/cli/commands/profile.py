"""`chameleon profile`: measure or derive the costs of layers, operations and links."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments, take_job_arguments
from chameleon_ft.cli.output import Output, require_places
from chameleon_ft.cluster import Link
from chameleon_ft.config import config_type, parse_config
from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import ConfigError
from chameleon_ft.protocol.address import TOKEN_VARIABLE
from chameleon_ft.quantities import data_size, duration
from chameleon_ft.session.configuration import read_config_values, refuse_job_arguments
from chameleon_ft.session.costs import NO_MODEL, ModelRequest, measured_profile
from chameleon_ft.storage.profiles import write_profile


@dataclass(frozen=True)
class ProfileArguments:
    """Measure the costs of a job's layers, of an operation and of the links between workers, on this machine.

    CONFIG describes the job: a TOML file as for `chameleon train`, or a Python file as for `chameleon run`, with
    --job.NAME for an argument of its function. For a
    published --model on a known --device, the costs are derived and nothing is run. To measure the link to another
    host, run `chameleon profile --serve HOST:PORT` there and give --peer HOST:PORT here, with the token that the first
    one prints in CHAMELEON_TOKEN.
    """

    config: Annotated[Path | None, "[CONFIG]"] = None
    """TOML file of a run, or Python file of a job."""
    out: Path | None = None
    """New file to write the profile to."""
    repeats: PositiveInt = 20
    """Measurements of each time; the median counts."""
    peer: Annotated[str | None, "HOST:PORT"] = None
    """Address at which another host serves, to measure the link to it as well."""
    serve: Annotated[str | None, "HOST:PORT"] = None
    """Serve hosts that measure the link to this one, until Ctrl-C."""
    preset: ModelRequest = NO_MODEL
    json: bool = False
    """Print the profile as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    rest, of_job = take_job_arguments(arguments)
    given = parse_arguments(ProfileArguments, rest, command="profile", positional=["config"])
    _check(given)
    if given.config is None:
        refuse_job_arguments(of_job)
    if given.serve is not None:
        from chameleon_ft.worker.profiling.links import serve_link

        serve_link(given.serve, token=_serving_token(), tell=lambda text: print(text, flush=True))
        return 0
    out = given.out
    if out is None:
        raise ConfigError("--out is missing: name the file that the profile is to be written to")
    if out.exists():
        raise ConfigError(f"--out {out}: exists already; name a new file, or remove it")
    require_places(profile=out)
    profile = given.preset.profile() if given.config is None else _measure(given, arguments, of_job)
    write_profile(profile, out)
    if given.json:
        print(out.read_text(encoding="utf-8"), end="")
    else:
        _show(profile)
        print(f"written to {out}")
    return 0


def _serving_token() -> str:
    """Return the token of the processes that measure: the user's, or a new one, which is shown on a terminal."""
    if (token := os.environ.get(TOKEN_VARIABLE)) is not None:
        return token
    if not sys.stdout.isatty():
        raise ConfigError(f"--serve: set {TOKEN_VARIABLE} to a secret of both hosts; it is not written to a log")
    token = secrets.token_urlsafe(16)
    print(f"on the other host: {TOKEN_VARIABLE}={token} chameleon profile CONFIG --peer HOST:PORT --out FILE")
    return token


def _check(given: ProfileArguments) -> None:
    """Raise ConfigError if the arguments do not go together."""
    if given.serve is not None:
        if (given.config, given.preset, given.peer, given.out) != (None, NO_MODEL, None, None):
            raise ConfigError(f"--serve {given.serve}: only answers; give the other flags on the host that measures")
        return
    if given.config is not None:
        given.preset.refuse(
            f"is for --model, and {given.config} says what is measured; leave one of them out",
            but=("--micro-batch-size",),
        )
    elif given.preset.model is None:
        raise ConfigError("nothing to profile: give a CONFIG, or a published --model and its --device")
    elif given.peer is not None:
        raise ConfigError(f"--peer {given.peer}: is for measuring a CONFIG; the links of --device are known")


def _measure(given: ProfileArguments, arguments: Sequence[str], job_arguments: Mapping[str, str]) -> Profile:
    assert given.config is not None
    values = read_config_values(given.config, job_arguments)
    if (size := given.preset.size) is not None:
        values["batch"] = {**values.get("batch", {}), "micro_batch_size": size}
    # Failures are injected into runs only.
    values.pop("failures", None)
    config = parse_config(config_type(values), values, source=str(given.config))
    token = os.environ.get(TOKEN_VARIABLE, "")
    if given.peer is not None and not token:
        raise ConfigError(
            f"--peer {given.peer}: set {TOKEN_VARIABLE} to the token of `chameleon profile --serve` there"
        )
    command = shlex.join(["chameleon", "profile", *arguments])
    return measured_profile(config, repeats=given.repeats, peer=given.peer, token=token, command=command)


def _show(profile: Profile) -> None:
    out = Output()
    fingerprint = profile.fingerprint
    out.text(
        f"{profile.name} on {fingerprint.device}, micro-batches of {fingerprint.micro_batch_size}, {fingerprint.dtype}",
        "bold",
    )
    out.text(profile.provenance)
    right = ["F", "B", "I", "W", "parameters", "kept F to B", "kept I to W", "output", "workspace"]
    out.show(out.table(_layer_rows(profile), left=["layers"], right=right))
    out.facts(_facts(profile))


def _layer_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Return a row for each run of layers that differ in nothing but their names and measured times."""
    rows = []
    untimed = partial(replace, name="", forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, fused_backward_s=None)
    for first, group in groupby(profile.layers, key=untimed):
        layers = list(group)
        times = [(each.forward_s, each.backward_s, each.input_grad_s, each.weight_grad_s) for each in layers]
        sizes = (
            first.param_bytes,
            first.activation_bytes,
            first.weight_grad_bytes,
            first.output_bytes,
            first.working_bytes,
        )
        rows.append(
            (
                layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}",
                *(duration(sum(column) / len(layers)) for column in zip(*times, strict=True)),
                *map(data_size, sizes),
            )
        )
    return rows


def _facts(profile: Profile) -> list[tuple[str, str]]:
    facts = [
        ("operation", f"{duration(profile.operation_overhead_s)} beside its layers"),
        ("link in a host", _describe_link(profile.intra_host)),
        ("link between hosts", "not measured" if profile.inter_host is None else _describe_link(profile.inter_host)),
    ]
    if profile.all_reduces:
        largest = max(profile.all_reduces, key=lambda reduce: (reduce.workers, reduce.num_bytes))
        ring_s = profile.intra_host.ring_all_reduce_s(largest.num_bytes, largest.workers)
        measured = f"{data_size(largest.num_bytes)} over {largest.workers} workers in {duration(largest.time.median_s)}"
        facts.append(("all-reduce", f"{measured}; {duration(ring_s)} by the ring formula"))
    if profile.times:
        slowest = max((layer.forward for layer in profile.times), key=lambda forward: forward.median_s)
        spread = f"{duration(slowest.min_s)} to {duration(slowest.largest_s)}"
        median = f"median of {slowest.count}: {duration(slowest.median_s)}"
        facts.append(("spread", f"F of the slowest layer takes {spread}, {median}"))
    capacity = "not checked" if profile.memory_bytes is None else data_size(profile.memory_bytes)
    return [*facts, ("memory of a worker", capacity)]


def _describe_link(link: Link) -> str:
    return f"{duration(link.latency_s)} + {data_size(link.bytes_per_s)}/s"
