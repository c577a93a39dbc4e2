"""The profile of a run, as the run's configuration means it."""

from __future__ import annotations

from collections.abc import Mapping

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ProfileError
from chameleon_ft.profiles.files import read_profile
from chameleon_ft.profiles.profile import Profile
from chameleon_ft.schedule import CostModel

__all__ = ["costs_of_run", "hosts_of_run", "profile_of_run"]


def profile_of_run(config: RunConfig) -> Profile:
    """Read the profile of `config`, as the run takes it: an emulated device may be slower.

    Raises:
        ProfileError: it cannot be read, or is of another micro-batch.
    """
    if config.profile is None:
        raise ProfileError("this run has no profile; set profile")
    profile = read_profile(config.profile)
    profile.require({"micro_batch_size": config.batch.micro_batch_size})
    if config.device != "emulated":
        return profile
    return profile.slowed(config.emulation.time_scale, least_latency_s=config.emulation.least_message_s)


def costs_of_run(config: RunConfig, profile: Profile, hosts: Mapping[int, str]) -> CostModel:
    """The cost model of a step on the workers of `hosts`, worker -> host, which are emulated ones where devices are.

    Raises ProfileError as `Profile.cluster` does.
    """
    return profile.costs(config.batch.micro_batches, hosts_of_run(config, hosts))


def hosts_of_run(config: RunConfig, hosts: Mapping[int, str]) -> Mapping[int, str]:
    """The host of each worker of `hosts`; where devices are emulated, the one that it is taken to be on."""
    if config.device != "emulated":
        return hosts
    return {worker: f"host{worker // config.emulation.workers_per_host}" for worker in hosts}
