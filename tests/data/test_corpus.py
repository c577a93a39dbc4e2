"""The data of a configuration: found, checked, and then equal in all processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chameleon_ft.config import Data, LlamaConfig, TrainConfig
from chameleon_ft.data import DataSummary, SampleOrder, check_data, load_sources, prepare_data
from chameleon_ft.data.samples import TokenWindows, load_micro_batch
from chameleon_ft.data.token_files import TokenArray, TokenShards
from chameleon_ft.errors import DataError
from tests.golden import refused

SEQ_LEN = 4


def make_config(path: Path | str, *, kind: str = "auto", dtype: str = "uint16", vocab_size: int = 256) -> TrainConfig:
    data = Data.model_validate({"path": str(path), "format": kind, "dtype": dtype})
    return TrainConfig(data=data, model=LlamaConfig(vocab_size=vocab_size, seq_len=SEQ_LEN))


def loaded(config: TrainConfig) -> TokenArray:
    (tokens,) = load_sources(config)
    assert not isinstance(tokens, TokenShards)
    return tokens


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_file_is_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "poem.txt", "grüße, world")
    config = make_config(path)

    summary = check_data(config)
    assert summary == DataSummary(source=f"data.path {path}", kind="text", num_tokens=14, num_samples=2, num_files=1)
    assert loaded(config).tobytes().decode() == "grüße, world"


def test_a_folder_is_read_in_the_order_of_names_and_skipped_files_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.txt", "fourth")
    write(tmp_path / "B.txt", "first")
    write(tmp_path / "picture.png", b"\x89PNG\xff\xfe")
    write(tmp_path / "zeros", b"\0\0\0\0")
    write(tmp_path / "nothing.txt", b"")
    write(tmp_path / ".git" / "config", "hidden")
    write(tmp_path / "c.txt", "third")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    config = make_config(tmp_path)

    assert loaded(config).tobytes() == b"first\nsecond\nthird\nfourth"
    summary = check_data(config)
    assert (summary.num_files, summary.num_tokens) == (4, 25)
    assert {skipped.path.name: skipped.reason for skipped in summary.skipped} == {
        "nothing.txt": "is empty",
        "picture.png": "is not UTF-8 text",
        "pipe": "is not a regular file",
        "link": "is a folder that is linked or cannot be listed",
        "zeros": "holds zero bytes, so it is not text",
    }


def test_runs_below_the_folder_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "poem.txt", "all there is")
    config = make_config(tmp_path)
    for name in ("first", "second"):
        run = tmp_path / "runs" / name
        write(run / "events.jsonl", "written before the data is prepared")
        prepare_data(config, run)
        assert (run / "data" / "text.bin").read_bytes() == b"all there is"

    assert check_data(config).num_files == 1


def test_a_folder_that_cannot_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "poem.txt", "all there is")
    closed = tmp_path / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # permissions do not bind root, who may run this test

    assert [skipped.path for skipped in check_data(make_config(tmp_path)).skipped] == [closed]


def test_a_character_may_lie_across_two_reads(tmp_path: Path) -> None:
    text = "x" * ((1 << 20) - 1) + "ü" + "x" * 10

    assert loaded(make_config(write(tmp_path / "long.txt", text))).tobytes() == text.encode()


def test_without_a_path_it_is_the_standard_library() -> None:
    config = make_config("")
    summary = check_data(config)
    text = loaded(config).tobytes()

    assert summary.kind == "text"
    assert len(text) == summary.num_tokens
    assert 1 << 20 < summary.num_tokens <= 8 << 20
    assert b"class ABCMeta" in text
    assert text.decode()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_token_file_is_its_ids(tmp_path: Path, dtype: str, suffix: str) -> None:
    ids = np.arange(23, dtype=dtype)
    path = tmp_path / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, ids)
    else:
        ids.tofile(path)
    config = make_config(path, dtype=dtype, vocab_size=23)

    summary = check_data(config)
    assert (summary.kind, summary.num_tokens, summary.num_samples) == ("tokens", 23, 4)
    tokens = loaded(config)
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("missing.txt", None, {}),
        ("missing.bin", None, {}),
        ("empty.txt", b"", {}),
        ("empty.bin", b"", {}),
        ("empty.npy", b"", {}),
        ("short.txt", b"abcd", {}),
        ("short.bin", b"\1\0" * 4, {}),
        ("odd.bin", b"\1\0" * 9 + b"\1", {}),
        ("large.bin", b"\1\0" * 9 + b"\0\1", {}),
        ("minus.bin", b"\xff" * 40, {"dtype": "int32"}),
        ("latin.txt", "grüße".encode("latin-1"), {}),
        ("text.txt", b"long enough", {"vocab_size": 255}),
        ("wrong.npy", b"no numpy file", {}),
        ("ids.bin", b"\xff\xfe" * 20, {"kind": "text"}),
    ],
)
def test_unusable_data_has_a_remedy(tmp_path: Path, name: str, content: bytes | None, options: dict[str, Any]) -> None:
    path = tmp_path / name
    if content is not None:
        write(path, content)

    with refused(DataError) as caught:
        check_data(make_config(path, **options))
    assert name in str(caught.value) or "vocab_size" in str(caught.value)


def test_an_id_beyond_the_vocabulary_is_found_in_a_later_chunk(tmp_path: Path) -> None:
    ids = np.zeros((1 << 22) + 3, dtype=np.uint16)
    ids[-1] = 700
    ids.tofile(tmp_path / "ids.bin")

    with refused(DataError):
        check_data(make_config(tmp_path / "ids.bin", vocab_size=700))
    check_data(make_config(tmp_path / "ids.bin", vocab_size=701))


@pytest.mark.parametrize("array", [np.zeros((3, 4), dtype=np.uint16), np.zeros(9)])
def test_an_array_of_another_kind_is_refused(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "ids.npy", array)

    with refused(DataError):
        check_data(make_config(tmp_path / "ids.npy"))


def test_an_empty_folder_and_a_folder_without_text_are_refused(tmp_path: Path) -> None:
    with refused(DataError):
        check_data(make_config(tmp_path))
    write(tmp_path / "picture.png", b"\xff\xfe")
    with refused(DataError):
        check_data(make_config(tmp_path))


def test_tokens_need_a_file(tmp_path: Path) -> None:
    with refused(DataError):
        check_data(make_config("", kind="tokens"))
    with refused(DataError):
        check_data(make_config(tmp_path, kind="tokens"))


def test_a_prepared_text_stays_when_its_source_changes(tmp_path: Path) -> None:
    source = write(tmp_path / "poem.txt", "as it was at first")
    config = make_config(source).model_copy(update={"output_dir": tmp_path / "run"})
    path = tmp_path / "run" / "data" / "text.bin"
    prepare_data(config, tmp_path / "run")
    write(source, "other")

    prepare_data(config, tmp_path / "run")
    assert path.read_bytes() == loaded(config).tobytes() == b"as it was at first"
    source.unlink()
    assert loaded(config).tobytes() == b"as it was at first"
    assert sorted(file.name for file in path.parent.iterdir()) == ["source.json", "text.bin"]


def test_a_run_directory_may_be_moved(tmp_path: Path) -> None:
    config = make_config(write(tmp_path / "poem.txt", "moved as a whole"))
    prepare_data(config, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")

    moved = config.model_copy(update={"output_dir": tmp_path / "elsewhere"})
    assert loaded(moved).tobytes() == b"moved as a whole"


def test_a_token_file_is_used_where_it_lies_and_missed_when_it_changes(tmp_path: Path) -> None:
    source = tmp_path / "ids.bin"
    np.arange(40, dtype=np.uint16).tofile(source)
    config = make_config(source).model_copy(update={"output_dir": tmp_path / "run"})

    prepare_data(config, tmp_path / "run")
    assert loaded(config).tolist() == list(range(40))
    np.arange(1, 41, dtype=np.uint16).tofile(source)
    for use in (loaded, lambda config: prepare_data(config, tmp_path / "run")):
        with refused(DataError):
            use(config)


def test_a_run_is_not_continued_on_other_data(tmp_path: Path) -> None:
    prepare_data(make_config(write(tmp_path / "one.txt", "the first text")), tmp_path / "run")
    other = make_config(write(tmp_path / "two.txt", "the second text"))

    with refused(DataError):
        prepare_data(other, tmp_path / "run")


def test_a_damaged_run_directory_is_named(tmp_path: Path) -> None:
    config = make_config(write(tmp_path / "one.txt", "the first text"))
    prepare_data(config, tmp_path / "run")
    write(tmp_path / "run" / "data" / "source.json", "{}")

    with refused(DataError):
        prepare_data(config, tmp_path / "run")


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = make_config(write(tmp_path / "one.txt", "the first text"))

    with refused(DataError):
        prepare_data(config, tmp_path / "one.txt")


def test_checking_data_imports_no_torch() -> None:
    code = (
        "import sys; from chameleon_ft.config import TrainConfig;"
        "from chameleon_ft.data import check_data, SampleOrder;"
        "check_data(TrainConfig()); SampleOrder(5, 0).ids(0, 2); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_samples_are_windows_that_do_not_overlap() -> None:
    windows = TokenWindows(np.arange(14, dtype=np.uint16), SEQ_LEN)

    assert len(windows) == 2
    order = SampleOrder(2, seed=0)
    inputs, targets = load_micro_batch(windows, order, 0, 2)
    if order.ids(0, 2) == [0, 1]:
        inputs, targets = inputs.flip(0), targets.flip(0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[5, 6, 7, 8], [0, 1, 2, 3]]
    assert targets.tolist() == [[6, 7, 8, 9], [1, 2, 3, 4]]
    for index in (-1, 2):
        with pytest.raises(IndexError):
            windows[index]


def test_too_few_tokens_for_a_window_are_refused() -> None:
    with refused(DataError):
        TokenWindows(np.arange(4, dtype=np.uint16), SEQ_LEN)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_mapped_data_set_travels_as_the_place_of_its_file(tmp_path: Path, suffix: str) -> None:
    ids = np.arange(50_000, dtype=np.uint16)
    path = tmp_path / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, ids)
    else:
        ids.tofile(path)
    windows = TokenWindows(loaded(make_config(path)), SEQ_LEN)
    pickled = pickle.dumps(windows)

    assert len(pickled) < 1000
    for copy in (pickle.loads(pickled), pickle.loads(pickle.dumps(TokenWindows(ids, SEQ_LEN)))):
        assert len(copy) == 10_000
        assert copy[9_999][0].tolist() == [49_995, 49_996, 49_997, 49_998]
    part = pickle.loads(pickle.dumps(TokenWindows(loaded(make_config(path))[100:200], SEQ_LEN)))
    assert part[0][0].tolist() == [100, 101, 102, 103]
