"""The message of a rank that ends with an error, and its log on a disk that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.worker.execution.bad_steps import describe_error
from chameleon_ft.worker.rank import _Log, _redirect_output

LONG = "out of memory. " + "Process 71 has 1.3 GiB memory in use. " * 20


def test_a_long_error_is_shortened_but_not_one_that_says_what_to_change() -> None:
    assert describe_error(RuntimeError(LONG)) == f"RuntimeError: {LONG[:240]} ..."
    assert describe_error(RuntimeError("out of memory\nwith a stack")) == "RuntimeError: out of memory"
    assert describe_error(ConfigError(LONG)) == f"ConfigError: {LONG.strip()}"


def test_a_log_that_cannot_be_written_is_no_error_of_the_code_that_prints() -> None:
    with Path("/dev/full").open("w") as full:
        log = _Log.text(full.fileno())
        print("a line", "x" * 100_000, file=log, flush=True)
        log.close()


def test_without_a_log_a_rank_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _redirect_output(tmp_path / "no folder" / "worker-1.log")
    print("a line")
    out, error = capsys.readouterr()
    assert out == "a line\n"
    assert error.startswith("there will be no log of this worker: [Errno 2] No such file or directory")
