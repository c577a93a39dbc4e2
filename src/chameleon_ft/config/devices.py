"""The devices that workers compute on, and the backends that send tensors between them: one registry of both.

It holds names and facts. `chameleon_ft.runtime.device` finds the devices of a host through torch, and
`chameleon_ft.runtime.communicators` makes the communicators of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

DeviceName: TypeAlias = Literal["cpu", "cuda", "npu", "xpu", "emulated"]
BackendName: TypeAlias = Literal["gloo", "nccl", "hccl", "xccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A library that sends tensors between workers.

    Attributes:
        receives_block: whether a wait for a message blocks the host, so that an interrupted rank knows which messages
            its results were made from. Steps are salvaged, and layers move while a run trains, only if it does.
        shares_devices: whether two workers can use one device.
        missing: work that is left to do before there are communicators of this backend; empty if there are.
    """

    receives_block: bool = False
    shares_devices: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        title: what it is, in words.
        backends: names of those that can send its tensors, the default first.
        is_accelerator: whether torch has the device under this name in `torch.accelerator`.
        package: package that adds the device to torch; empty if torch has it.
        run_on: backend -> hardware that real runs of this project were made on.
    """

    title: str
    backends: tuple[BackendName, ...]
    is_accelerator: bool = True
    package: str = ""
    run_on: Mapping[BackendName, str] = field(default_factory=dict)


_NOT_WRITTEN: Final = (
    "its communicators are not written, because how to interrupt an operation that hangs has to be tried on such a "
    "device"
)

BACKENDS: Final[Mapping[BackendName, Backend]] = {
    "gloo": Backend(receives_block=True, shares_devices=True),
    "nccl": Backend(),
    "hccl": Backend(missing=_NOT_WRITTEN),
    "xccl": Backend(missing=_NOT_WRITTEN),
}

DEVICES: Final[Mapping[DeviceName, DeviceKind]] = {
    "cpu": DeviceKind(
        title="CPU", backends=("gloo",), is_accelerator=False, run_on={"gloo": "AMD EPYC, two cores, torch 2.13.0"}
    ),
    "cuda": DeviceKind(
        title="NVIDIA GPU",
        backends=("gloo", "nccl"),
        run_on={"gloo": "NVIDIA H200, one that four ranks share, torch 2.11.0"},
    ),
    "npu": DeviceKind(title="Ascend NPU", backends=("gloo", "hccl"), package="torch_npu"),
    "xpu": DeviceKind(title="Intel GPU", backends=("gloo", "xccl")),
    "emulated": DeviceKind(
        title="emulated device",
        backends=("gloo",),
        is_accelerator=False,
        run_on={"gloo": "AMD EPYC, two cores, torch 2.13.0"},
    ),
}
