"""torch's own process groups, made one by one and without its global registry: what their type stubs leave out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from chameleon_ft.runtime.communicators.host_names import numeric_address, without_name_server

__all__ = ["Group", "Store", "Work", "connect_store", "gloo_device", "gloo_group", "host_store", "nccl_group"]

Store = c10d.Store
Work = c10d.Work


class Group(Protocol):
    """A process group. Its members are numbered from 0."""

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def abort(self) -> None: ...

    def eager_connect_single_device(self, device: torch.device) -> None: ...


def host_store(host: str, port: int, listener: int, *, timeout_s: float) -> Store:
    """Serve a store on the listening socket whose file descriptor is `listener`."""
    return c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> Store:
    """Connect to a store. Raises RuntimeError, and OSError where `host` is not known."""
    address = numeric_address(host)
    with without_name_server():
        return c10d.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )


def gloo_device(address: str) -> Any:
    """Return a device that listens on `address` for the other members of its groups."""
    return c10d.ProcessGroupGloo.create_device(hostname=address)


def gloo_group(store: Store, prefix: str, rank: int, size: int, *, device: Any, timeout_s: float) -> Group:
    """Connect with all members; blocks until they are there. Raises RuntimeError."""
    gloo = cast("Any", c10d.ProcessGroupGloo)
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return cast("Group", gloo(c10d.PrefixStore(prefix, store), rank, size, options))


def nccl_group(store: Store, prefix: str, rank: int, size: int, *, timeout_s: float) -> Group:
    """Make a group with a non-blocking communicator, not connected yet."""
    nccl = cast("Any", c10d.ProcessGroupNCCL)
    options = nccl.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=timeout_s)
    return cast("Group", nccl(c10d.PrefixStore(prefix, store), rank, size, options))
