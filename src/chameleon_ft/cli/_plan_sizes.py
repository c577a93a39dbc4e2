"""The micro-batch sizes that `chameleon plan` is to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chameleon_ft.cli._config_file import config_values
from chameleon_ft.cli._plan_case import Layout
from chameleon_ft.cli._presets import AUTO, PresetArguments
from chameleon_ft.config import Batch, Parallel, parse_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.profiles import read_profile

__all__ = ["layouts_by_size"]


def layouts_by_size(
    layout: Layout, preset: PresetArguments, profiles: Sequence[Path], config: Path | None, samples: int | None
) -> list[tuple[Layout, Path | None]]:
    """The layout at each micro-batch size that is given, ascending, with the file of its profile.

    The samples of a step are `samples`, or those of `config`.

    Raises:
        ConfigError: a size does not divide the samples, or nothing says how many there are, or both samples and
            micro-batches are given, or two profiles are of one size.
        ProfileError: a profile cannot be read, or profiles are of different devices.
    """
    files = _by_size(profiles) if len(profiles) > 1 else {}
    if files and preset.micro_batch_size is not None:
        raise ConfigError(
            f"--micro-batch-size {preset.micro_batch_size}: the profiles that are given are of "
            f"{', '.join(map(str, sorted(files)))}; leave it out"
        )
    auto = preset.micro_batch_size == AUTO
    sizes = tuple(sorted(files)) or preset.sizes
    if not auto and len(sizes) < 2 and samples is None:
        return [(replace(layout, micro_batch_size=preset.size), profiles[0] if profiles else None)]
    if layout.micro_batches is not None:
        raise ConfigError(
            f"--micro-batches {layout.micro_batches}: follow from the samples of a step and the micro-batch size; "
            "leave it out, and give the samples by --global-batch-size"
        )
    batch, dp = Batch(micro_batch_size=1), layout.dp or 1
    if config is not None:
        values = config_values(config)
        batch = parse_config(Batch, values.get("batch", {}), source=f"{config}, batch")
        if layout.workers is None and layout.dp is None:
            dp = parse_config(Parallel, values.get("parallel", {}), source=f"{config}, parallel").dp
    elif profiles:
        batch = Batch(micro_batch_size=read_profile(profiles[0]).fingerprint.micro_batch_size)
    if samples is None:
        if config is None:
            raise ConfigError(
                "several micro-batch sizes are compared for the same samples in a step; say how many by "
                "--global-batch-size"
            )
        samples = batch.samples
    if auto:
        sizes = tuple(_powers_of_two(samples, dp))
    return [
        (
            replace(layout, micro_batch_size=size, micro_batches=_micro_batches(samples, size)),
            files.get(size, profiles[0] if profiles else None),
        )
        for size in sizes or (batch.micro_batch_size,)
    ]


def _by_size(profiles: Sequence[Path]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    first = read_profile(profiles[0]).fingerprint
    for path in profiles:
        profile = read_profile(path)
        # Boundaries, which tell models apart, have other sizes for other micro-batches.
        profile.require({"dtype": first.dtype, "device": first.device, "threads": first.threads})
        size = profile.fingerprint.micro_batch_size
        if size in found:
            raise ConfigError(
                f"--profile {path}: is of micro-batches of {size}, as {found[size]} is; give one of each size"
            )
        found[size] = path
    return found


def _powers_of_two(samples: int, dp: int) -> Iterator[int]:
    """One, and the larger ones of which there are as many for each of `dp` pipelines."""
    size = 1
    while size == 1 or samples % (size * dp) == 0:
        yield size
        size *= 2


def _micro_batches(samples: int, size: int) -> int:
    if samples % size:
        near = max(each for each in range(1, min(size, samples) + 1) if samples % each == 0)
        raise ConfigError(
            f"a micro-batch size of {size} does not divide the {samples} samples of a step; take {near}, or another "
            "number of samples by --global-batch-size"
        )
    return samples // size
