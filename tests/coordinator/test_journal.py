from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator.command_runner import RunSetup
from chameleon_ft.coordinator.commands import Command
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.events import Event, Moment, Received
from chameleon_ft.coordinator.journal import Journal, LastEntry, is_due
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Acknowledged, Hello, HostHello
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.recorder import Recorder, View
from tests.coordinator.histories import History
from tests.coordinator.stage import JOB, Puppet, Stage, scene


@cache
def states(*, steps: int) -> Sequence[State]:
    """The states of a short run, one for each change."""
    history = History()
    found: list[State] = []
    happen = history.happen

    def noting(*arguments: object) -> object:
        answer = happen(*arguments)  # type: ignore[arg-type]
        found.append(history.state)
        return answer

    history.happen = noting  # type: ignore[assignment, method-assign]
    history.train(steps)
    history.reap(1)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(1.0)
    return tuple(found)


@contextmanager
def journal_at(path: Path, *, longest_bytes: int = 1 << 20) -> Iterator[Journal]:
    with FileQueue() as files:
        yield Journal(path, files, longest_bytes=longest_bytes)


def moment(second: float) -> Moment:
    return Moment(unix_s=1e9 + second, monotonic_s=second)


@given(until=st.integers(1, 30))
def test_the_last_state_is_read_whatever_came_before(tmp_path_factory: pytest.TempPathFactory, until: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    written = states(steps=2)[:until]
    with journal_at(path) as journal:
        for number, state in enumerate(written):
            journal.write(state, moment(number))
    last = LastEntry.read(path)
    assert last is not None
    # The clock alone, and what detectors have observed, are not worth a line.
    assert replace(written[-1], ticked_at_s=last.state.ticked_at_s, detectors=last.state.detectors) == last.state
    assert last.state.detectors in [state.detectors for state in written]


def test_of_all_ranks_that_join_before_the_run_begins_only_the_last_need_be_in_the_journal_at_once() -> None:
    history = History()
    due: list[str] = []
    happen = history.happen

    def noting(event: Event) -> tuple[Command, ...]:
        orders = happen(event)
        if isinstance(event, Received) and is_due(event, history.state, orders):
            due.append(f"{event.message.type} of {getattr(event.message, 'worker', 'a host')}")
        return orders

    history.happen = noting  # type: ignore[method-assign]
    history.gather()
    assert due == ["host_hello of a host", "hello of 3"]
    due.clear()
    history.start()
    history.take_over()
    history.return_agent()
    history.return_worker(0, known=1)
    assert due == ["host_hello of a host", "hello of 0"], (
        "how many of their messages count depends on their connections"
    )


def test_an_unfinished_line_is_as_if_it_had_never_been_begun(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *_, last = states(steps=2)
    last = replace(last, ended=("failed", "an error with \u2018quotes\u2019\u2028 and lines\x85\x0b"))
    with journal_at(path) as journal:
        journal.write(first, moment(1.0), received={7: 1})
        size = path.stat().st_size
        journal.write(last, moment(2.0), received={7: 2}, records=[("metrics", {"step": 1})])
    text = path.read_bytes()
    for length in (*range(size, len(text) - 50, 7), *range(len(text) - 50, len(text) - 1)):
        path.write_bytes(text[:length])
        found = LastEntry.read(path)
        assert found == LastEntry(first, moment(1.0), {7: 1}, [])
    path.write_bytes(text)
    assert LastEntry.read(path) == LastEntry(last, moment(2.0), {7: 2}, [("metrics", {"step": 1})])


def test_a_change_that_is_not_due_is_written_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *_, last = states(steps=2)
    with journal_at(path) as journal:
        journal.write(first, moment(1.0), received={7: 1})
        journal.write(replace(first, committed=1), moment(2.0), received={7: 2}, is_due=False)
        assert LastEntry.read(path) == LastEntry(first, moment(1.0), {7: 1}, [])
        journal.write(last, moment(3.0), received={8: 1})
    assert LastEntry.read(path) == LastEntry(last, moment(3.0), {7: 2, 8: 1}, [])


def test_only_what_has_changed_is_written_and_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *others = states(steps=2)
    with journal_at(path, longest_bytes=20_000) as journal:
        journal.write(first, moment(0.0))
        whole = path.stat().st_size
        journal.write(first, moment(1.0))
        assert path.stat().st_size == whole, "nothing has changed"
        journal.write(replace(first, committed=1), moment(2.0), received={3: 9})
        assert path.stat().st_size - whole < 100
        for number in range(200):
            journal.write(replace(others[number % len(others)], committed=number), moment(3.0 + number))
            assert path.stat().st_size < 40_000
    last = LastEntry.read(path)
    assert last is not None
    assert (last.state.committed, last.received, last.at) == (199, {3: 9}, moment(202.0))


def test_no_journal_is_no_entry_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert LastEntry.read(path) is None
    path.write_text("")
    assert LastEntry.read(path) is None
    begin = '{"format": "chameleon-journal-1"'
    for fields in (', "at": [1, 2], "state": {"phase": "nowhere"}}', ', "parts": 3}', ', "state": []}', "}"):
        path.write_text(f"{begin}{fields}\n")
        with pytest.raises(ControlError):
            LastEntry.read(path)
    for text in ("3", "[]", "\0"):
        path.write_text(f"{text}\n")
        with pytest.raises(ControlError):
            LastEntry.read(path)


@pytest.mark.parametrize(("found", "named"), [(None, "an older one"), ("chameleon-journal-9", "chameleon-journal-9")])
def test_the_journal_of_another_version_is_an_error(tmp_path: Path, found: str | None, named: str) -> None:
    path = tmp_path / "journal.jsonl"
    with journal_at(path) as journal:
        for number, state in enumerate(states(steps=1)):
            journal.write(state, moment(number))
    first, *others = path.read_text().splitlines()
    fields = {key: value for key, value in json.loads(first).items() if key != "format"}
    fields |= {} if found is None else {"format": found}
    path.write_text("\n".join([json.dumps(fields), *others, ""]))
    with pytest.raises(ControlError):
        LastEntry.read(path)


@scene()
async def test_a_journal_after_a_takeover_has_the_counts_of_peers_that_are_still_away(stage: Stage) -> None:
    stage.train()
    counts = {7: 70, 9: 3}
    last = LastEntry(stage.coordinator.state, moment(5.0), counts, [])
    with journal_at(stage.run.journal_file(1)) as journal, Recorder(stage.run, View()) as recorder:
        config = stage.run.config()
        setup = RunSetup(config=config, run=stage.run, recorder=recorder, job=JOB, resume=True)
        coordinator = Coordinator(setup, journal=journal, last=last)
        assert coordinator.first_connection > max(counts), "no peer resumes a connection that another one had"
    found = LastEntry.read(stage.run.journal_file(1))
    assert found is not None
    assert found.received == counts
    assert found.state.reconnection.awaited


@scene()
async def test_a_rank_that_is_not_in_the_journal_does_not_get_the_count_of_another_peer(stage: Stage) -> None:
    stage.say(stage.host, HostHello(host="a host", slots=4))
    stage.join(0)
    last = LastEntry(stage.coordinator.state, moment(5.0), {stage.host.number: 1}, [])
    with journal_at(stage.run.journal_file(1)) as journal, Recorder(stage.run, View()) as recorder:
        setup = RunSetup(config=stage.run.config(), run=stage.run, recorder=recorder, job=JOB, resume=False)
        stage.coordinator = Coordinator(setup, journal=journal, last=last)
        host, rank = Puppet("host"), Puppet("worker 2")
        ranks = tuple((worker, 1) for worker in range(4))
        stage.say(host, HostHello(host="a host", slots=4, ranks=ranks, resumes=stage.host.number))
        assert host.last(Acknowledged).received == 1
        # The coordinator that is lost had called the rank's connection so.
        stage.say(rank, Hello(worker=2, host="10.0.0.1", incarnation=1, resumes=host.number))
        assert (rank.last(Acknowledged).received, rank.last(Acknowledged).written) == (0, 0)
        assert stage.coordinator.state.members.live() == (0, 2)


def test_records_of_the_last_change_alone_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *_, last = states(steps=2)
    with journal_at(path) as journal:
        journal.write(first, moment(1.0), records=[("metrics", {"step": 0})])
        journal.write(last, moment(2.0), records=[("metrics", {"step": 1}), ("events", {"event": "a"})])
    found = LastEntry.read(path)
    assert found is not None
    assert found.records == [("metrics", {"step": 1}), ("events", {"event": "a"})]


@pytest.mark.parametrize("longest_bytes", [0, 2_000, 1 << 20])
def test_a_disk_that_does_not_answer_gets_the_newest_state_once_it_does(tmp_path: Path, longest_bytes: int) -> None:
    path = tmp_path / "journal.jsonl"
    first, *others = states(steps=2)
    answered = threading.Event()
    with FileQueue() as files:
        journal = Journal(path, files, longest_bytes=longest_bytes)
        journal.write(first, moment(0.0), received={7: 1})
        files.submit(path, answered.wait)
        for number, state in enumerate(others, start=1):
            journal.write(state, moment(number), received={7: 1 + number}, records=[("metrics", {"step": number})])
            if longest_bytes == 0:
                assert files.num_waiting <= 3, "there are no changes to write that the whole state contains"
        assert len(files.unwritten()[1]) == files.num_waiting - 1 - (longest_bytes < 1 << 20)
        answered.set()
        journal.write(others[0], moment(100.0))
        assert files.ask(path, lambda: None).result(10.0) is None
    found = LastEntry.read(path)
    assert found is not None
    assert (found.state, found.received) == (others[0], {7: len(others) + 1})


def test_a_disk_that_is_late_does_not_get_the_whole_state_with_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes: list[Path] = []
    replace_file = FileQueue.replace

    def replaced(self: FileQueue, path: Path, text: Callable[[], str], *, mode: int) -> int:
        wholes.append(path)
        return replace_file(self, path, text, mode=mode)

    monkeypatch.setattr(FileQueue, "replace", replaced)
    first, *others = states(steps=2)
    answered = threading.Event()
    with FileQueue() as files:
        journal = Journal(tmp_path / "journal.jsonl", files)
        journal.write(first, moment(0.0))
        files.submit(tmp_path / "other", answered.wait)
        for number, state in enumerate(others, start=1):
            journal.write(state, moment(number))
        assert files.is_late
        answered.set()
    assert len(wholes) == 1


def test_after_a_line_that_is_dropped_comes_the_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *others = states(steps=2)
    answered = threading.Event()
    with FileQueue(longest_bytes=300) as files:
        journal = Journal(path, files)
        journal.write(first, moment(0.0))
        files.submit(path, answered.wait)
        for number, state in enumerate(others, start=1):
            journal.write(state, moment(number))
        answered.set()
        assert files.ask(path, lambda: None).result(10.0) is None
        journal.write(others[0], moment(100.0))
        journal.write(others[1], moment(101.0))
    found = LastEntry.read(path)
    assert found is not None
    assert found.state == replace(others[1], detectors=found.state.detectors, ticked_at_s=found.state.ticked_at_s)


@scene()
async def test_reports_of_a_step_that_is_committed_write_no_lines(stage: Stage) -> None:
    path = stage.run.journal_file(1)
    with FileQueue() as files:
        stage.coordinator._journal = Journal(path, files)
        stage.gather(4)
        stage.start()
        stage.commit(0, 0)
        size = path.stat().st_size
        for worker in (1, 2, 3):
            stage.commit(0, worker)
            assert not stage.coordinator.state.members.in_first_step.issuperset({worker})
        assert path.stat().st_size == size
