"""The message of a rank that ends with an error."""

from __future__ import annotations

from chameleon_ft.errors import ConfigError
from chameleon_ft.runtime.rank import _described

LONG = "out of memory. " + "Process 71 has 1.3 GiB memory in use. " * 20


def test_a_long_error_is_shortened_but_not_one_that_says_what_to_change() -> None:
    assert _described(RuntimeError(LONG)) == f"RuntimeError: {LONG[:240]} ..."
    assert _described(RuntimeError("out of memory\nwith a stack")) == "RuntimeError: out of memory"
    assert _described(ConfigError(LONG)) == f"ConfigError: {LONG.strip()}"
