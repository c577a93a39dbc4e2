"""A module for fork servers to load, which has them fail as `FAILS` in the environment says."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Any

FAILS = "CHAMELEON_TEST_FORK_SERVER"


def _deaf(*_: Any) -> Any:
    time.sleep(1000)


def _unable(*_: Any) -> int:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


match os.environ.get(FAILS):
    case "deaf":
        socket.recv_fds = _deaf  # type: ignore[assignment]
    case "unable":
        os.fork = _unable
