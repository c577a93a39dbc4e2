"""A run on a Ray cluster: the coordinator is an actor that Ray restarts, and each node has an actor with the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray.options import ClusterOptions

if TYPE_CHECKING:
    from chameleon_ft.config import RunConfig
    from chameleon_ft.storage.files import RunDirectory

__all__ = ["ClusterOptions", "train"]


def train(config: RunConfig, *, run: RunDirectory, resume: bool, options: ClusterOptions) -> int:
    """Train on a Ray cluster; see `chameleon_ft.launch.ray.driver.train`.

    Raises:
        ConfigError: Ray is not installed, or as there.
    """
    try:
        from chameleon_ft.launch.ray import driver
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("Ray is not installed; install it by `pip install 'chameleon-ft[ray]'`") from None
    return driver.train(config, run=run, resume=resume, options=options)
