"""Files of token ids of other tools: their headers and indexes are told from ids."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    path.with_suffix(".idx").write_text("an index of something else")
    assert open_tokens(path, "int32").tolist() == IDS


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
