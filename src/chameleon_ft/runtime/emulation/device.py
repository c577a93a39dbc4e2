"""What a rank uses in place of a device."""

from __future__ import annotations

from collections.abc import Iterable

from chameleon_ft.config import RunConfig
from chameleon_ft.models.stand_in import stand_in_scale
from chameleon_ft.profiles import costs_of_run, profile_of_run
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.emulation.links import EmulatedLinks
from chameleon_ft.runtime.emulation.pace import EmulatedPace
from chameleon_ft.runtime.process import wake_on_time
from chameleon_ft.schedule import CostModel

__all__ = ["EmulatedDevice"]


class EmulatedDevice:
    """The device and the links of one worker, as the profile of the run has them. Raises ProfileError as that does."""

    def __init__(self, config: RunConfig, worker: int) -> None:
        self._config = config
        self._profile = profile_of_run(config)
        self._scale = stand_in_scale(self._profile)
        self.pace = EmulatedPace(self._costs([worker]), worker)
        wake_on_time()

    def links(self, inner: Communicators) -> Communicators:
        """Communicators that are as slow as the emulated links."""
        return EmulatedLinks(inner, lambda workers: self._costs(workers).cluster, scale=self._scale)

    def _costs(self, workers: Iterable[int]) -> CostModel:
        return costs_of_run(self._config, self._profile, dict.fromkeys(workers, ""))
