"""The journal in a file; `histories.History` also journals and replays every event of its histories."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chameleon_ft
from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.command_runner import RunSetup
from chameleon_ft.coordinator.commands import Command, Record
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.events import EndRequested, Event, Moment, Received
from chameleon_ft.coordinator.journal import Journal, LastEntry
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.coordinator.state_machine import step
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Acknowledged, Committed, Hello, HostHello
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.recorder import Recorder, RecordLine, View, line_of
from tests.coordinator.histories import History, new_state
from tests.coordinator.journaled import but_clock
from tests.coordinator.stage import JOB, Puppet, Stage, scene


class Change(NamedTuple):
    """What one event leads to."""

    event: Event
    before: State
    after: State
    commands: tuple[Command, ...]

    def write(self, journal: Journal, received: dict[int, int] | None = None) -> None:
        journal.write(*self, received=received)

    @property
    def records(self) -> list[RecordLine]:
        return [line_of(each.record) for each in self.commands if isinstance(each, Record)]


class Recorded(History):
    """A history whose changes are kept."""

    def __init__(self, state: State | None = None) -> None:
        super().__init__(state)
        self.changes: list[Change] = []

    def happen(self, event: Event) -> tuple[Command, ...]:
        self.changes.append(Change(event, self.state, *step(self.state, event)))
        return super().happen(event)


@cache
def changes(*, steps: int) -> Sequence[Change]:
    """The changes of a short run."""
    history = Recorded()
    history.train(steps)
    history.reap(1)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(1.0)
    return tuple(history.changes)


@contextmanager
def journal_at(path: Path, *, min_bytes: int = 1 << 20) -> Iterator[Journal]:
    with FileQueue() as files:
        yield Journal(path, files, min_bytes=min_bytes)


def moment(second: float) -> Moment:
    return Moment(unix_s=1e9 + second, monotonic_s=second)


def read(path: Path) -> LastEntry:
    last = LastEntry.read(path)
    assert last is not None
    return last


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@given(until=st.integers(1, 60))
def test_the_state_after_the_last_event_is_read_whatever_came_before(
    tmp_path_factory: pytest.TempPathFactory, min_bytes: int, until: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    written = changes(steps=2)[:until]
    with journal_at(path, min_bytes=min_bytes) as journal:
        for change in written:
            change.write(journal)
        journal.flush()
    assert but_clock(read(path).state) == but_clock(written[-1].after)


def test_of_all_ranks_that_join_before_the_run_begins_only_the_last_need_be_in_the_journal_at_once(
    tmp_path: Path,
) -> None:
    history = Recorded()
    path = tmp_path / "journal.jsonl"

    def written(journal: Journal) -> list[str]:
        """Write the newest changes; return the messages that were written at once."""
        due = []
        for change in history.changes:
            size = path.stat().st_size
            change.write(journal)
            if isinstance(change.event, Received) and path.stat().st_size > size:
                message = change.event.message
                due.append(f"{message.type} of {message.member.worker if isinstance(message, Hello) else 'a host'}")
        history.changes.clear()
        return due

    with journal_at(path) as journal:
        journal.begin(history.state, moment(0.0))
        history.gather()
        assert written(journal) == ["host_hello of a host", "hello of 3"]
        history.start()
        history.take_over()
        written(journal)
        history.return_agent()
        history.return_worker(0, known=1)
        assert written(journal) == ["host_hello of a host", "hello of 0"], (
            "how many of their messages count depends on their connections"
        )


def test_an_unfinished_line_is_as_if_it_had_never_been_begun(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = new_state()
    event = EndRequested(at=moment(2.0), status="failed", reason="\u2018quotes\u2019\u2028 and lines\x85\x0b")
    last = Change(event, first, *step(first, event))
    with journal_at(path) as journal:
        journal.begin(first, moment(1.0), received={7: 1})
        size = path.stat().st_size
        last.write(journal, received={7: 2})
    text = path.read_bytes()
    for length in (*range(size, len(text) - 50, 7), *range(len(text) - 50, len(text) - 1)):
        path.write_bytes(text[:length])
        assert LastEntry.read(path) == LastEntry(first, moment(1.0), {7: 1}, [])
    path.write_bytes(text)
    assert LastEntry.read(path) == LastEntry(last.after, moment(2.0), {7: 2}, last.records)


def test_an_event_that_is_not_due_is_written_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    late = next(
        each
        for each in changes(steps=2)
        if isinstance(each.event, Received) and isinstance(each.event.message, Committed) and not each.records
    )
    with journal_at(path) as journal:
        journal.begin(late.before, moment(1.0), received={7: 1})
        late.write(journal, received={7: 2})
        assert read(path).received == {7: 1}
        journal.flush(received={8: 1})
        assert read(path).received == {7: 2, 8: 1}
        assert read(path).state == late.after


def test_an_event_that_changes_nothing_is_not_written_and_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    history = Recorded(new_state(steps=1000))
    history.train(2)
    with journal_at(path, min_bytes=20_000) as journal:
        journal.begin(history.state, moment(0.0))
        history.changes.clear()
        history.wait(0.1)
        size = path.stat().st_size
        for change in history.changes:
            change.write(journal)
        assert path.stat().st_size == size, "nothing has changed but the clock"
        whole, longest = size, 0
        for _ in range(100):
            history.changes.clear()
            history.commit()
            for change in history.changes:
                change.write(journal)
            longest = max(longest, path.stat().st_size)
        assert longest < 7 * whole
        journal.flush(received={3: 9})
    last = read(path)
    assert (last.state.committed, last.received) == (102, {3: 9})


def test_a_report_is_as_long_as_itself_however_many_workers_there_are() -> None:
    workers = 32
    history = History(new_state(workers=workers, steps=100, recovery=Recovery(respawn=False)))
    history.train(steps=2)
    history.reap(5)
    history.replayed.lines.clear()
    history.quiesce()
    assert max(map(len, history.replayed.lines[: workers - 2])) < 1000


def test_no_journal_is_no_entry_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert LastEntry.read(path) is None
    path.write_text("")
    assert LastEntry.read(path) is None
    with journal_at(path) as journal:
        journal.begin(new_state(), moment(0.0))
    first = path.read_text()
    at = {"unix_s": 1.0, "monotonic_s": 1.0}
    lines: list[object] = [
        {"type": "Nothing", "ticked_at_s": None, "event": {}},
        {"type": "Ticked", "event": {"at": at}},
        {"type": "Ticked", "ticked_at_s": None, "event": {}},
        {"type": "Received", "ticked_at_s": None, "event": {"at": at, "connection": 1, "message": {"type": "x"}}},
        [],
    ]
    for line in lines:
        path.write_text(f"{first}{json.dumps(line)}\n")
        with pytest.raises(ControlError):
            LastEntry.read(path)
    for text in ("3", "[]", "\0", '{"format": "chameleon-journal-2"}'):
        path.write_text(f"{text}\n")
        with pytest.raises(ControlError):
            LastEntry.read(path)


@pytest.mark.parametrize("fields", [{"format": None}, {"format": "chameleon-journal-1"}, {"version": "0.0.1"}])
def test_the_journal_of_another_version_is_an_error(tmp_path: Path, fields: dict[str, str | None]) -> None:
    path = tmp_path / "journal.jsonl"
    with journal_at(path) as journal:
        for change in changes(steps=1):
            change.write(journal)
    first, *others = path.read_text().splitlines()
    assert json.loads(first)["version"] == chameleon_ft.__version__
    path.write_text("\n".join([json.dumps({**json.loads(first), **fields}), *others, ""]))
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
        stage.say(rank, Hello(member=Member(2, 1), host="10.0.0.1", resumes=host.number))
        assert (rank.last(Acknowledged).received, rank.last(Acknowledged).written) == (0, 0)
        assert stage.coordinator.state.members.live() == (0, 2)


def test_records_of_the_last_event_alone_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with journal_at(path) as journal:
        for change in changes(steps=2):
            change.write(journal)
            if change.records:
                assert read(path).records == change.records


@pytest.mark.parametrize("min_bytes", [0, 2_000, 1 << 20])
def test_a_disk_that_does_not_answer_gets_the_newest_state_once_it_does(tmp_path: Path, min_bytes: int) -> None:
    path = tmp_path / "journal.jsonl"
    first, *others = changes(steps=2)
    answered = threading.Event()
    with FileQueue() as files:
        journal = Journal(path, files, min_bytes=min_bytes)
        first.write(journal, received={7: 1})
        files.submit(path, answered.wait)
        for number, change in enumerate(others, start=1):
            change.write(journal, received={7: 1 + number})
        journal.flush()
        answered.set()
        assert files.ask(path, lambda: None).result(10.0) is None
    assert but_clock(read(path).state) == but_clock(others[-1].after)
    assert read(path).received == {7: len(others) + 1}


def test_a_disk_that_is_late_does_not_get_the_whole_state_with_each_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes: list[Path] = []
    replace_file = FileQueue.replace

    def replaced(self: FileQueue, path: Path, text: Callable[[], str], *, mode: int) -> int:
        wholes.append(path)
        return replace_file(self, path, text, mode=mode)

    monkeypatch.setattr(FileQueue, "replace", replaced)
    first, *others = changes(steps=2)
    answered = threading.Event()
    with FileQueue() as files:
        journal = Journal(tmp_path / "journal.jsonl", files)
        first.write(journal)
        files.submit(tmp_path / "other", answered.wait)
        for change in others:
            change.write(journal)
        assert files.is_late
        answered.set()
    assert len(wholes) == 1


def test_after_a_line_that_is_dropped_comes_the_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, *others = changes(steps=2)
    answered = threading.Event()
    with FileQueue(longest_bytes=300) as files:
        journal = Journal(path, files)
        first.write(journal)
        files.submit(path, answered.wait)
        for change in others[:-1]:
            change.write(journal)
        answered.set()
        assert files.ask(path, lambda: None).result(10.0) is None
        others[-1].write(journal)
        journal.flush()
    assert but_clock(read(path).state) == but_clock(others[-1].after)


@scene()
async def test_later_reports_of_a_step_that_is_committed_do_not_wait_for_the_disk(stage: Stage) -> None:
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
