"""Authorization of actions on the page of a run: a token, which cannot be guessed by trying many."""

from __future__ import annotations

import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal

_logger = logging.getLogger(__name__)

_MOST_WRONG: Final = 5  # tokens of an address
_LOCKED_S: Final = 30.0  # after so many
_MOST_ADDRESSES: Final = 1_000  # that are remembered


class TokenGate:
    """Checks tokens. Five wrong ones lock an address out for half a minute, but for the right one; each is logged.

    Behind a proxy, the one who knows the token may have the address of one who guesses.
    """

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected = f"Bearer {token}".encode()
        self._clock = clock
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()  # address -> number, time of the last

    def check(self, address: str, authorization: str) -> Literal["open", "wrong", "locked"]:
        """Return whether a request with this header may act."""
        number, last = self._wrong.get(address, (0, 0.0))
        now = self._clock()
        if now - last > _LOCKED_S:
            number = 0
        if hmac.compare_digest(authorization.encode(errors="replace"), self._expected):
            return "open"
        if number >= _MOST_WRONG:
            return "locked"
        self._wrong.pop(address, None)
        self._wrong[address] = (number + 1, now)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)
        locked = f"; it is locked out for {_LOCKED_S:.0f} s" if number + 1 == _MOST_WRONG else ""
        _logger.warning("the page was sent a wrong token from %s%s", address, locked)
        return "wrong"
