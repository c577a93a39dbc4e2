"""The batches that `chameleon plan` predicts: the same samples of a step in micro-batches of several sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chameleon_ft.cli.costs import AUTO
from chameleon_ft.cli.plan_arguments import PlanArguments
from chameleon_ft.cli.run_config import read_config_values
from chameleon_ft.config import Batch, Parallel, parse_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.profiles import read_profile


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """One batch to predict: its micro-batches, and the file of their profile; None if the arguments do not say."""

    micro_batch_size: int | None
    micro_batches: int | None
    profile: Path | None


def plan_batches(given: PlanArguments) -> list[PlanBatch]:
    """Return the batch at each micro-batch size, all of the same samples: --global-batch-size, or those of CONFIG."""
    preset, profiles = given.preset, given.profile
    files = _profiles_by_size(profiles) if len(profiles) > 1 else {}
    if files and preset.micro_batch_size is not None:
        raise ConfigError(
            f"--micro-batch-size {preset.micro_batch_size}: the profiles that are given are of "
            f"{', '.join(map(str, sorted(files)))}; leave it out"
        )
    only_profile = profiles[0] if profiles else None
    sizes = tuple(sorted(files)) or preset.sizes
    samples = given.global_batch_size
    if preset.micro_batch_size != AUTO and len(sizes) < 2 and samples is None:
        return [PlanBatch(preset.size, given.micro_batches, only_profile)]
    if given.micro_batches is not None:
        raise ConfigError(
            f"--micro-batches {given.micro_batches}: follow from the samples of a step and the micro-batch size; "
            "leave it out, and give the samples by --global-batch-size"
        )
    batch, dp = Batch(micro_batch_size=1), given.dp or 1
    if given.config is not None:
        values = read_config_values(given.config)
        batch = parse_config(Batch, values.get("batch", {}), source=f"{given.config}, batch")
        if given.workers is None and given.dp is None:
            dp = parse_config(Parallel, values.get("parallel", {}), source=f"{given.config}, parallel").dp
        samples = samples or batch.samples
    elif only_profile is not None:
        batch = Batch(micro_batch_size=read_profile(only_profile).fingerprint.micro_batch_size)
    if samples is None:
        raise ConfigError(
            "several micro-batch sizes are compared for the same samples in a step; say how many by --global-batch-size"
        )
    if preset.micro_batch_size == AUTO:
        # Powers of two of which there are as many for each pipeline; one in any case.
        powers = [2**exponent for exponent in range(1, samples.bit_length())]
        sizes = (1, *(size for size in powers if samples % (size * dp) == 0))
    return [
        PlanBatch(size, _micro_batches(samples, size), files.get(size, only_profile))
        for size in sizes or (batch.micro_batch_size,)
    ]


def _profiles_by_size(profiles: tuple[Path, ...]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    first = read_profile(profiles[0]).fingerprint
    for path in profiles:
        profile = read_profile(path)
        # The model is not compared: its boundaries, which identify it, have other sizes for other micro-batches.
        profile.require({"dtype": first.dtype, "device": first.device, "threads": first.threads})
        size = profile.fingerprint.micro_batch_size
        if size in found:
            raise ConfigError(
                f"--profile {path}: is of micro-batches of {size}, as {found[size]} is; give one of each size"
            )
        found[size] = path
    return found


def _micro_batches(samples: int, size: int) -> int:
    if samples % size:
        near = max(each for each in range(1, min(size, samples) + 1) if samples % each == 0)
        raise ConfigError(
            f"a micro-batch size of {size} does not divide the {samples} samples of a step; take {near}, or another "
            "number of samples by --global-batch-size"
        )
    return samples // size
