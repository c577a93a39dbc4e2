"""The devices that workers compute on, and the backends that send tensors between them: names and facts.

`chameleon_ft.worker.device` finds the devices of a host through torch, and `chameleon_ft.worker.communicators` makes
the communicators of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from chameleon_ft.config.sections import OrInstalled
from chameleon_ft.registry import Registry

DeviceName: TypeAlias = Literal["cpu", "cuda", "npu", "xpu", "emulated"]
BackendName: TypeAlias = Annotated[Literal["gloo", "nccl", "hccl", "xccl"], OrInstalled("backends")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLibrary:
    """A library that sends tensors from device to device: how it differs from the others of its kind.

    Attributes:
        process_group: the place of its process group, a class like torch's `ProcessGroupNCCL`.
        abort: the method of a process group that ends its operations, and its arguments; empty if there is none.
        is_nonblocking: True if a communicator can be formed in the background, by ``Options.config.blocking = 0``.
        stream_priority: the priority at which its communicators take the streams of torch in turn; None if each has one
            of its own, or this is not known.
        environment: variables that are set before it is used, in which {} stands for the seconds that a communicator
            may take to form.
        version: the place of a function that returns its version, as numbers.
        shared_from: the first version with which several workers can share a device; empty if they can with any.
    """

    process_group: str
    abort: tuple[str, ...] = ("abort",)
    is_nonblocking: bool = False
    stream_priority: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    shared_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to send tensors between workers.

    Attributes:
        communicators: the place of a function that makes the communicators of a rank, see `worker.communicators`.
        library: the library of the device, if one carries part of the messages.
        shares_devices: True if two workers can use one device.
        devices: names of the devices whose tensors it can send, for a backend of an installed package.
    """

    communicators: str = ""
    library: DeviceLibrary | None = None
    shares_devices: bool = False
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        title: what it is, in words.
        backends: names of those that can send its tensors, the default first.
        is_accelerator: True if torch has the device under this name in `torch.accelerator`.
        package: package that adds the device to torch; empty if torch has it.
        run_on: backend -> hardware that real runs of this project were made on.
    """

    title: str
    backends: tuple[BackendName, ...]
    is_accelerator: bool = True
    package: str = ""
    run_on: Mapping[BackendName, str] = field(default_factory=dict)


_TWO_PARTS: Final = "chameleon_ft.worker.communicators.two_parts:TwoPartCommunicators.of_rank"

BACKENDS: Final = Registry[Backend](
    "backend",
    "backends",
    {
        "gloo": Backend(
            communicators="chameleon_ft.worker.communicators.gloo:GlooCommunicators.of_rank",
            shares_devices=True,
        ),
        "nccl": Backend(
            communicators=_TWO_PARTS,
            library=DeviceLibrary(
                process_group="torch._C._distributed_c10d:ProcessGroupNCCL",
                is_nonblocking=True,
                # The most urgent that torch has, or that the device has if these are fewer.
                stream_priority=-3,
                environment={
                    # Torch's own watchdog would end the process when an operation fails.
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
                    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "{:.0f}",
                    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                },
                version="torch.cuda.nccl:version",
                shared_from=(2, 30),
            ),
            shares_devices=True,
        ),
        "hccl": Backend(
            communicators=_TWO_PARTS,
            library=DeviceLibrary(
                process_group="torch_npu._C._distributed_c10d:ProcessGroupHCCL", abort=("abort_hccl_comm", "reinit")
            ),
        ),
        # Its abort returns at once and ends nothing.
        "xccl": Backend(
            communicators=_TWO_PARTS,
            library=DeviceLibrary(process_group="torch._C._distributed_c10d:ProcessGroupXCCL", abort=()),
        ),
    },
)

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
