"""Object stores: files and parts in them, requests that fail, are refused or get no answer, and checkpoints."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from chameleon_ft.config import TrainConfig
from chameleon_ft.errors import ConfigError, DamagedCheckpointError, StoreError
from chameleon_ft.storage import stores as object_store
from chameleon_ft.storage.checkpoints import (
    complete_checkpoints,
    damage_of,
    discard_checkpoint,
    incomplete_checkpoints,
    layer_part,
    link_checkpoint,
    mark_complete,
    mark_damaged,
    prune_checkpoints,
    read_mark,
    seal_layer,
    slice_part,
    sound_checkpoint,
)
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import ObjectStore, RecordCopies, has_records, storage_of
from tests.golden import refused

TIMEOUT_S = 30.0


class UncertainFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Calls `before` with the name of each request, which may raise or block."""

    protocol = "uncertain"
    before: Callable[[str], None] = staticmethod(lambda name: None)
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the base class
    pseudo_dirs = [""]  # noqa: RUF012

    def info(self, path: str, **options: Any) -> Any:
        type(self).before("info")
        return super().info(path, **options)

    def find(self, path: str, **options: Any) -> Any:
        type(self).before("find")
        return super().find(path, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        type(self).before("pipe_file")
        return super().pipe_file(path, value, **options)


fsspec.register_implementation("uncertain", UncertainFileSystem)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    folder = f"/{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "store")
    return ObjectStore(f"{request.param}://{folder}/run/", timeout_s=TIMEOUT_S)


@pytest.fixture
def uncertain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(object_store, "_BACK_OFF_S", 0.0)
    yield ObjectStore(f"uncertain://{uuid.uuid4().hex}/run", timeout_s=TIMEOUT_S)
    UncertainFileSystem.before = staticmethod(lambda name: None)


def put_part(store: ObjectStore, part: str, **files: str) -> None:
    with store.writing(part) as draft:
        draft.mkdir()
        for name, content in files.items():
            (draft / name).write_text(content)


# --- files and parts -------------------------------------------------------------------------------------------------


def test_files_are_written_replaced_listed_and_removed(store: ObjectStore) -> None:
    assert store.names() == store.names("nowhere") == []
    store.write("folder/one", "first")
    store.write("folder/one", "second")
    store.write("folder/deeper/two", "2")
    assert store.read("folder/one") == b"second"
    assert store.names() == ["folder"]
    assert store.names("folder") == ["deeper", "one"]
    assert store.sizes("folder") == {"one": 6, "deeper/two": 1}
    assert store.exists("folder/one")
    assert not store.exists("folder/three")
    store.rename("folder/one", "folder/three")
    assert store.read("folder/three") == b"second"
    assert not store.exists("folder/one")
    store.remove("folder/three")
    store.remove("folder")
    store.remove("folder")
    assert store.names() == []
    assert store.sizes("folder") == {}
    with pytest.raises(FileNotFoundError) as missing:
        store.read("folder/one")
    assert missing.value.filename == f"{store.url}/folder/one"


def test_a_part_is_read_as_it_was_written(store: ObjectStore) -> None:
    put_part(store, "step/layer-0", one="1", two="22")
    put_part(store, "step/layer-0", one="one", three="333")
    with store.reading("step/layer-0") as files:
        assert {file.name: file.read_text() for file in files.iterdir()} == {"one": "one", "three": "333"}
    assert not files.exists(), "nothing is left behind"
    assert store.names("step") == ["layer-0.tar"]


def test_nothing_is_stored_of_a_part_whose_writing_fails(store: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError), store.writing("step/layer-0") as draft:
        (draft / "missing").read_text()
    assert store.names() == []


def test_a_part_that_cannot_be_unpacked_is_damaged(store: ObjectStore) -> None:
    store.write("step/layer-0.tar", "no archive")
    with (
        refused(DamagedCheckpointError),
        store.reading("step/layer-0"),
    ):
        pass


def test_a_store_that_works_passes_its_check_and_keeps_nothing_of_it(store: ObjectStore) -> None:
    store.check()
    assert store.names() == []


# --- requests --------------------------------------------------------------------------------------------------------


def assert_set(event: threading.Event) -> None:
    """Wait for an event."""
    assert event.wait(TIMEOUT_S)


def failing(times: int, error: Exception) -> Callable[[str], None]:
    """Return what raises `error` the first `times` times."""
    left = [error] * times

    def before(name: str) -> None:
        if left:
            raise left.pop()

    return before


def test_a_request_that_fails_is_tried_again(uncertain: ObjectStore) -> None:
    UncertainFileSystem.before = staticmethod(failing(3, OSError("slow down")))
    uncertain.write("file", "content")
    assert uncertain.read("file") == b"content"


def test_a_request_that_fails_again_and_again_is_given_up(uncertain: ObjectStore) -> None:
    UncertainFileSystem.before = staticmethod(failing(4, OSError("slow down")))
    with refused(StoreError):
        uncertain.write("file", "content")
    assert not uncertain.exists("file")


def test_a_refusal_is_not_tried_again_and_says_what_to_check(uncertain: ObjectStore) -> None:
    UncertainFileSystem.before = staticmethod(failing(1, PermissionError("Access Denied")))
    with refused(ConfigError):
        uncertain.check()
    uncertain.check()


def test_a_request_without_an_answer_is_given_up_and_later_ones_are_made(uncertain: ObjectStore) -> None:
    goes_on = threading.Event()
    UncertainFileSystem.before = staticmethod(lambda name: assert_set(goes_on))
    impatient = ObjectStore(uncertain.url, timeout_s=0.1)
    with refused(StoreError):
        impatient.write("file", "content")
    goes_on.set()
    impatient.write("other", "content")
    assert impatient.read("other") == b"content"


def test_what_has_to_be_read_is_waited_for(uncertain: ObjectStore) -> None:
    UncertainFileSystem.before = staticmethod(failing(20, OSError("no route to host")))
    ObjectStore(uncertain.url, timeout_s=TIMEOUT_S, gives_up=False).write("file", "content")
    assert uncertain.exists("file")


@pytest.mark.parametrize("url", ["bogus://bucket/run", "ftp2://a/b"])
def test_a_kind_of_store_that_does_not_exist_is_refused(url: str) -> None:
    with refused(ConfigError):
        ObjectStore(url, timeout_s=TIMEOUT_S).check()


def test_a_kind_of_store_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with refused(ConfigError):
        ObjectStore("s3://bucket/run", timeout_s=TIMEOUT_S).check()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(place: Path | ObjectStore, step: int, *, is_marked: bool = True) -> None:
    """Write a checkpoint of two layers, one of which has a slice."""
    slices = [(1, 0, 65536)]
    for part in (layer_part(step, 0), layer_part(step, 1), slice_part(step, *slices[0])):
        with storage_of(place).writing(part) as draft:
            draft.mkdir(parents=True)
            (draft / "tensors").write_text(f"those of {part}")
            seal_layer(draft, {"weight": [1, 2]})
    if is_marked:
        mark_complete(place, step, model="a model", num_layers=2, slices=slices)


def test_only_marked_checkpoints_count(store: ObjectStore) -> None:
    write_checkpoint(store, 10)
    write_checkpoint(store, 20, is_marked=False)
    store.write("step-notes/complete.json", "of the user")
    assert complete_checkpoints(store) == [10]
    assert incomplete_checkpoints(store) == [20]
    assert sound_checkpoint(store) == (10, {})
    assert read_mark(store, 10)["model"] == "a model"
    assert read_mark(store, 10)["slices"] == [[1, 0, 65536]]
    assert read_mark(store, 20) == {}


def test_missing_and_cut_objects_are_found_without_reading_them(store: ObjectStore) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(store, step)
    store.remove(f"{layer_part(40, 1)}.tar")
    store.write(f"{layer_part(30, 0)}.tar", "cut")
    mark = store.read("step-00000020/complete.json").decode()
    store.write("step-00000020/complete.json", mark.replace("model", "modle"))
    newest, damages = sound_checkpoint(store)
    assert newest == 10
    assert damages[40] == f"{store.url}/{layer_part(40, 1)}.tar is missing"
    assert "has 3 bytes instead of" in damages[30]
    assert damages[20] == f"{store.url}/step-00000020/complete.json is not as it was written"


def test_a_store_that_does_not_answer_is_no_damage(uncertain: ObjectStore) -> None:
    write_checkpoint(uncertain, 10)
    UncertainFileSystem.before = staticmethod(failing(1, PermissionError("Access Denied")))
    with pytest.raises(StoreError):
        damage_of(uncertain, 10)
    assert damage_of(uncertain, 10) is None


def test_a_damaged_checkpoint_loses_its_mark(store: ObjectStore) -> None:
    write_checkpoint(store, 10)
    mark_damaged(store, 10)
    assert complete_checkpoints(store) == incomplete_checkpoints(store) == []
    write_checkpoint(store, 10)
    assert complete_checkpoints(store) == [10]
    assert "damaged.json" not in store.names("step-00000010")


def test_old_checkpoints_and_those_that_failed_are_removed(store: ObjectStore) -> None:
    write_checkpoint(store, 5, is_marked=False)
    for step in (10, 20, 30, 40):
        write_checkpoint(store, step)
    write_checkpoint(store, 50, is_marked=False)
    prune_checkpoints(store, keep=2, base=10)
    assert store.names() == ["step-00000010", "step-00000030", "step-00000040", "step-00000050"]
    discard_checkpoint(store, 50)
    discard_checkpoint(store, 40)
    assert store.names() == ["step-00000010", "step-00000030", "step-00000040"]


def test_a_checkpoint_is_copied_between_stores_and_directories(store: ObjectStore, tmp_path: Path) -> None:
    write_checkpoint(store, 10)
    here, other = tmp_path / "here", ObjectStore(f"memory://{uuid.uuid4().hex}/run", timeout_s=TIMEOUT_S)
    here.mkdir()
    link_checkpoint(store, 10, here)
    link_checkpoint(here, 10, other)
    for place in (here, other):
        assert sound_checkpoint(place) == (10, {})
        assert read_mark(place, 10)["model"] == "a model"
        with storage_of(place).reading(slice_part(10, 1, 0, 65536)) as files:
            assert (files / "tensors").read_text() == f"those of {slice_part(10, 1, 0, 65536)}"


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_are_copied_when_they_have_changed_and_come_back(store: ObjectStore, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", TrainConfig())
    copies = RecordCopies(run, store)
    run.metrics_file.write_text('{"step": 0}\n')
    run.plans.mkdir()
    run.plan_file(3).write_text("{}")
    assert not has_records(store)
    copies.save()
    assert has_records(store)
    store.write(run.config_file.name, "seen")  # is not copied again, since it has not changed
    run.metrics_file.write_text('{"step": 0}\n{"step": 1}\n')
    copies.save()
    assert store.read(run.config_file.name) == b"seen"
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    RecordCopies(other, store).fetch()
    assert other.metrics_file.read_text() == run.metrics_file.read_text()
    assert other.last_generation() == 3
    assert sorted(path.name for path in other.path.iterdir()) == ["config.toml", "metrics.jsonl", "plans"]
