"""The files of a run, as commands of other machines read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.coordinator import peers as served_files
from chameleon_ft.coordinator.peers import read_part
from chameleon_ft.protocol.messages import ReadRunFile, Refused, RunFilePart
from chameleon_ft.storage.files import RunDirectory
from tests.report.live.lines import add, new_run, stepped


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def test_a_long_file_is_read_in_parts_of_whole_lines(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_files, "_PART_BYTES", 300)
    add(run, *(stepped(step, float(step)) for step in range(10)))
    content, size, parts = "", 1, 0
    while len(content.encode()) < size:
        part = read_part(run, ReadRunFile(name="metrics.jsonl", offset=len(content.encode())))
        assert isinstance(part, RunFilePart)
        assert part.content.endswith("\n")
        content, size, parts = content + part.content, part.size, parts + 1
    assert content == run.metrics_file.read_text()
    assert parts > 3


def test_a_file_that_is_not_there_yet_is_empty(run: RunDirectory) -> None:
    assert read_part(run, ReadRunFile(name="plans/generation-1.json")) == RunFilePart(content="", size=0)


@pytest.mark.parametrize(
    "name", ["control.json", "page.json", "../secret", "/etc/passwd", "plans/../control.json", "plans/..", ""]
)
def test_other_files_are_not_read(run: RunDirectory, name: str) -> None:
    run.plans.mkdir(exist_ok=True)
    (run.path / "control.json").write_text("{}")
    assert isinstance(read_part(run, ReadRunFile(name=name)), Refused)
