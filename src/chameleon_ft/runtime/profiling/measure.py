"""Measuring everything that a profile holds, for the job of a configuration."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, ConfigError
from chameleon_ft.job import Job, load_job
from chameleon_ft.models.build import boundary_specs
from chameleon_ft.profiles import Profile
from chameleon_ft.runtime.device import claim_device, device_memory_bytes
from chameleon_ft.runtime.inspection import inspect_job
from chameleon_ft.runtime.profiling.hops import ModelOnDevice
from chameleon_ft.runtime.profiling.layers import MeasuredLayers, measure_layers
from chameleon_ft.runtime.profiling.link_peer import measure_link_to
from chameleon_ft.runtime.profiling.links import local_backend, measure_local_links, message_sizes

__all__ = ["Measuring", "measure_profile", "model_on_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How to measure.

    Attributes:
        repeats: how often each time is taken, after some that do not count.
        peer: host:port of `chameleon profile --serve` on another host; None where the link to one is not measured.
        command: what the user has called, for the provenance.
        progress: told what is being measured.
    """

    repeats: int
    peer: str | None
    command: str
    progress: Callable[[str], None]


def measure_profile(config: RunConfig, how: Measuring) -> Profile:
    """Measure the job of `config` on the device at hand.

    Raises:
        ConfigError: the job cannot be trained with `config`, there is no such device, or nobody answers on `how.peer`.
        ControlError: the processes that measure links cannot reach each other.
    """
    if config.device == "emulated":
        raise ConfigError('device = "emulated": there is nothing to be measured of it; name the real device')
    device = claim_device(config)
    info = inspect_job(config)
    model = model_on_device(config, load_job(config.job, config), device)
    layers = _measured_layers(config, model, how)
    sizes = message_sizes(info.boundary_bytes)
    how.progress("links inside this host")
    local = measure_local_links(config, message_bytes=sizes, repeats=how.repeats)
    inter_host = None
    if how.peer is not None:
        how.progress(f"the link to {how.peer}")
        inter_host = measure_link_to(how.peer, config, message_bytes=sizes, repeats=how.repeats)
    return Profile(
        name=info.model,
        fingerprint=info.profiled_as(config),
        source="measured",
        provenance=_provenance(config, how),
        layers=layers.costs,
        times=layers.times,
        operation_overhead_s=layers.operation_overhead_s,
        intra_host=local.link,
        inter_host=inter_host,
        all_reduces=local.all_reduces,
        memory_bytes=device_memory_bytes(device),
    )


def model_on_device(config: RunConfig, job: Job, device: torch.device) -> ModelOnDevice:
    """The job's layers, to be built one after the other, and the first micro-batch of a run."""
    return ModelOnDevice(
        job,
        boundaries=boundary_specs(job, config.batch.micro_batch_size),
        micro_batch_size=config.batch.micro_batch_size,
        seed=config.seed,
        device=device,
    )


def _measured_layers(config: RunConfig, model: ModelOnDevice, how: Measuring) -> MeasuredLayers:
    try:
        return measure_layers(model, repeats=how.repeats, progress=how.progress)
    except ChameleonError:
        raise
    except Exception as error:  # whatever the user's layers raise is the user's to mend
        raise ConfigError(f"job {config.job}: {type(error).__name__}: {error}") from error


def _provenance(config: RunConfig, how: Measuring) -> str:
    over = local_backend(config).backend
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"measured on {date} by `{how.command}`: medians of {how.repeats} times each; links of a host over {over}"
