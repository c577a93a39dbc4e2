"""Files of token ids of other tools: their headers and indexes are told from ids."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chameleon_ft.data.corpus import kind_of, open_path
from chameleon_ft.data.text import find_text
from chameleon_ft.data.token_files import open_tokens
from chameleon_ft.errors import DataError
from tests.examples import examples
from tests.golden import refused

IDS = [*range(300), 7, 0, 0]


def with_header(path: Path, ids: list[int], *, magic: int, dtype: str, count: int | None = None) -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def with_index(path: Path, ids: list[int], *, code: int, dtype: str, lengths: list[int]) -> Path:
    path.write_bytes(np.array(ids, dtype).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    rest = np.array(lengths, np.int32).tobytes() + bytes(8 * len(lengths)) + bytes(8 * (len(lengths) + 1))
    path.with_suffix(".idx").write_bytes(head + rest)
    return path


@pytest.mark.parametrize(
    ("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32"), (20250211, "uint16"), (20250211, "uint32")]
)
def test_a_header_is_no_token(tmp_path: Path, magic: int, dtype: str) -> None:
    path = with_header(tmp_path / "ids.bin", IDS, magic=magic, dtype=dtype)
    assert open_tokens(path, dtype).tolist() == IDS
    with refused(DataError):
        open_tokens(path, "uint32" if dtype == "uint16" else "uint16")


@pytest.mark.parametrize("count", [len(IDS) + 1, len(IDS) - 1, 0, -1])
def test_a_header_that_tells_another_length_is_refused(tmp_path: Path, count: int) -> None:
    path = with_header(tmp_path / "ids.bin", IDS, magic=20240520, dtype="uint16", count=count)
    with refused(DataError):
        open_tokens(path, "uint16")


def test_a_header_without_ids_is_an_empty_file(tmp_path: Path) -> None:
    with refused(DataError):
        open_tokens(with_header(tmp_path / "ids.bin", [], magic=20240520, dtype="uint16"), "uint16")


def test_an_index_has_to_fit_its_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    assert open_tokens(with_index(path, IDS, code=8, dtype="uint16", lengths=[300, 3]), "uint16").tolist() == IDS
    with refused(DataError):
        open_tokens(path.with_suffix(".idx"), "uint16")
    with refused(DataError):
        open_tokens(path, "uint8")
    with_index(path, IDS, code=8, dtype="uint16", lengths=[300, 4])
    with refused(DataError):
        open_tokens(path, "uint16")
    assert open_tokens(with_index(path, IDS, code=4, dtype="int32", lengths=[303]), "int32").tolist() == IDS
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:20])
    with refused(DataError):
        open_tokens(path, "int32")
    path.with_suffix(".idx").write_text("an index of something else")
    assert open_tokens(path, "int32").tolist() == IDS


def test_shards_of_llm_c_are_named_by_a_pattern(tmp_path: Path) -> None:
    parts = [IDS, [5] * 40, IDS[:7]]
    for number, ids in enumerate(parts):
        with_header(tmp_path / f"web_train_{number:06d}.bin", ids, magic=20240520, dtype="uint16")
    with_header(tmp_path / "web_val_000000.bin", [9], magic=20240520, dtype="uint16")
    # Validation data would be trained on.
    with refused(DataError):
        kind_of(tmp_path)
    pattern = tmp_path / "web_train_*.bin"
    assert kind_of(pattern) == "tokens"
    tokens, whole = open_path(pattern, "uint16"), [id_ for ids in parts for id_ in ids]
    assert tokens.size == len(tokens) == len(whole)
    for begin in range(0, len(whole), 17):
        for end in (begin, begin + 1, begin + 60, len(whole)):
            assert tokens[begin:end].tolist() == whole[begin:end]
    copy = pickle.loads(pickle.dumps(tokens))
    assert copy[290:350].tolist() == whole[290:350]
    with refused(DataError):
        open_path(tmp_path / "none_*.bin", "uint16")
    with_header(tmp_path / "web_train_000003.bin", IDS, magic=20240801, dtype="uint32")
    with refused(DataError):
        open_path(pattern, "uint16")
    np.save(tmp_path / "web_train_000003.bin.npy", np.array(IDS, np.int64))
    (tmp_path / "web_train_000003.bin.npy").rename(tmp_path / "web_train_000003.bin")
    with refused(DataError):
        open_path(pattern, "uint16")


def test_documents_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text('{"text": "a"}\n')
    with refused(DataError):
        kind_of(path)


def test_files_of_megatron_are_named_by_their_prefix(tmp_path: Path) -> None:
    with_index(tmp_path / "corpus_text_document.bin", IDS, code=8, dtype="uint16", lengths=[300, 3])
    prefix = tmp_path / "corpus_text_document"
    assert kind_of(prefix) == "tokens"
    assert open_path(prefix, "uint16")[:].tolist() == IDS
    with refused(DataError):
        open_path(prefix, "int32")
    with refused(DataError):
        open_path(prefix.with_suffix(".idx"), "uint16")
    assert kind_of(prefix.with_suffix(".idx")) == "tokens"
    prefix.with_suffix(".idx").unlink()
    with refused(DataError):
        find_text(prefix)


def test_a_folder_of_nanogpt_is_no_text(tmp_path: Path) -> None:
    """Its `prepare.py` and its notes would be trained on."""
    np.array(IDS, np.uint16).tofile(tmp_path / "train.bin")
    np.array(IDS[:50], np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 300, "stoi": {}}))
    (tmp_path / "input.txt").write_text("what it was made of")
    with refused(DataError):
        kind_of(tmp_path)
    assert kind_of(tmp_path / "train.bin") == "tokens"
    assert open_path(tmp_path / "train.bin", "uint16").size == len(IDS)


def test_a_numpy_file_is_recognised_under_any_name(tmp_path: Path) -> None:
    with (tmp_path / "ids.bin").open("wb") as file:
        np.save(file, np.array(IDS, np.uint16))
    assert open_tokens(tmp_path / "ids.bin", "uint32").tolist() == IDS


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"PAR1", b"ARROW1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x89HDF"])
def test_a_file_of_another_kind_is_no_file_of_ids(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(start.ljust(5_000, b"\0"))
    with refused(DataError):
        open_tokens(path, "uint16")


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=800), st.sampled_from(["uint16", "uint32", "int64"]))
def test_raw_ids_are_all_ids(tmp_path: Path, ids: list[int], dtype: str) -> None:
    path = tmp_path / "ids.bin"
    np.array(ids, dtype).tofile(path)
    assert open_tokens(path, dtype).tolist() == ids
