"""The pretended library as a backend, `pretended-nccl`, whose entry point is in the folder beside this file."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.config import BACKENDS, Backend

_NCCL: Final = BACKENDS["nccl"]
assert _NCCL.library is not None

PRETENDED_NCCL: Final = Backend(
    communicators=_NCCL.communicators,
    library=replace(_NCCL.library, process_group="torch_npu.nccl:ProcessGroup", version="torch_npu.nccl:version"),
    shares_devices=True,
    devices=("npu",),
)
