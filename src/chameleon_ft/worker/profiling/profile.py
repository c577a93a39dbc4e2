"""Measures a profile for the job of a configuration."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from chameleon_ft.config import RunConfig
from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.reference import load_job
from chameleon_ft.worker.device import claim_device, worker_memory_bytes
from chameleon_ft.worker.inspection import inspect_job, users_errors
from chameleon_ft.worker.profiling.layers import ModelOnDevice, measure_layers
from chameleon_ft.worker.profiling.links import local_backend, measure_link_to, measure_local_links, message_sizes


def measure_profile(
    config: RunConfig, *, repeats: int, peer: str | None, token: str, command: str, progress: Callable[[str], None]
) -> Profile:
    """Measure the job of `config` on the device at hand.

    Args:
        repeats: how often each time is taken, after some that do not count.
        peer: host:port of `chameleon profile --serve` on another host; None where the link to one is not measured.
        token: secret of this process and of the one at `peer`.
        command: the user's command, for the provenance.
        progress: called with each thing that is about to be measured.

    Raises:
        ConfigError: the job cannot be trained with `config`, there is no such device, or no process answers on `peer`.
        ControlError: the processes that measure links cannot reach each other.
    """
    if config.is_emulated:
        raise ConfigError('device = "emulated": there is nothing to be measured of it; name the real device')
    device = claim_device(config)
    info = inspect_job(config)
    model = ModelOnDevice(load_job(config.job, config), config, device)
    with users_errors(config):
        layers = measure_layers(model, repeats=repeats, progress=progress)
    # Before other processes use the device.
    memory_bytes = worker_memory_bytes(config, device)
    sizes = message_sizes(info.boundary_bytes)
    progress("links inside this host")
    local = measure_local_links(config, message_bytes=sizes, repeats=repeats)
    inter_host = None
    if peer is not None:
        progress(f"the link to {peer}")
        inter_host = measure_link_to(peer, config, token=token, message_bytes=sizes, repeats=repeats)
    date, backend = datetime.datetime.now(datetime.UTC).date().isoformat(), local_backend(config).backend
    how = f"measured on {date} by `{command}`: medians of {repeats} times each; links of a host over {backend}"
    return Profile(
        name=info.model,
        fingerprint=info.profiled_as(config),
        source="measured",
        provenance=how,
        layers=layers.costs,
        times=layers.times,
        operation_overhead_s=layers.operation_overhead_s,
        intra_host=local.link,
        inter_host=inter_host,
        all_reduces=local.all_reduces,
        memory_bytes=memory_bytes,
    )
