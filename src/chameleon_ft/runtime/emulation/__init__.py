"""Emulated devices: operations, messages and reductions that last as long as a profile says.

Only for processes of one machine, for they share its clock.
"""

from __future__ import annotations

from chameleon_ft.runtime.emulation.device import EmulatedDevice
from chameleon_ft.runtime.emulation.links import EmulatedLinks
from chameleon_ft.runtime.emulation.pace import EmulatedPace

__all__ = ["EmulatedDevice", "EmulatedLinks", "EmulatedPace"]
