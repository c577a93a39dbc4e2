"""Hosts that are network namespaces of this machine, and whose links can be cut."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

ADDRESSES = {"coordinator": "10.77.0.1", "first": "10.77.0.2", "second": "10.77.0.3"}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Network:
    """Hosts on one switch, which is on the one named "coordinator"; they are network namespaces of this machine.

    Raises CalledProcessError when it is entered, if they cannot be made.
    """

    prefix: str

    def name(self, host: str) -> str:
        """Return the network namespace of a host."""
        return f"{self.prefix}-{host}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in ADDRESSES:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", self.name(host)], check=False, capture_output=True)

    def _build(self) -> None:
        for host in ADDRESSES:
            _ip("netns", "add", self.name(host))
            _ip("-n", self.name(host), "link", "set", "lo", "up")
        switch = self.name("coordinator")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{ADDRESSES['coordinator']}/24", "dev", "switch")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in ("first", "second"):
            _ip("-n", switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", self.name(host))
            _ip("-n", switch, "link", "set", host, "master", "switch", "up")
            _ip("-n", self.name(host), "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            _ip("-n", self.name(host), "link", "set", "eth0", "up")

    def cut_off(self, host: str) -> None:
        """Pull a host's cable out of the switch."""
        _ip("-n", self.name("coordinator"), "link", "set", host, "down")

    def connect(self, host: str) -> None:
        """Put it in again."""
        _ip("-n", self.name("coordinator"), "link", "set", host, "up")

    def drop(self, sender: str, receiver: str) -> None:
        """Have all packets from one host to another vanish silently, until `heal`."""
        nowhere, own = "02:00:00:00:00:01", interface(sender)
        _ip("-n", self.name(sender), "neigh", "replace", ADDRESSES[receiver], "lladdr", nowhere, "dev", own)

    def heal(self, sender: str, receiver: str) -> None:
        _ip("-n", self.name(sender), "neigh", "del", ADDRESSES[receiver], "dev", interface(sender))


def interface(host: str) -> str:
    """Return the name of a host's interface to the others."""
    return "switch" if host == "coordinator" else "eth0"
