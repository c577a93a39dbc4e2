"""The tokens of a run: checked before it starts, then fixed, and the same in all processes.

A text is copied once into the run directory, as bytes. The workers, `verify` and a resumed run map this file, so they
see the same samples even if the source has changed. A token file is used in place, and recognised by its fingerprint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from chameleon_ft.data.text import BYTE_VOCABULARY, SkippedFile, TextFiles, find_text, write_text
from chameleon_ft.data.tokens import Tokens, check_ids, fingerprint, open_tokens
from chameleon_ft.errors import DataError

if TYPE_CHECKING:
    from chameleon_ft.config import TrainConfig

_TOKEN_SUFFIXES = frozenset({".bin", ".npy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The data that a configuration names.

    Attributes:
        source: description.
        kind: ``text`` (a byte is a token) or ``tokens``.
        num_tokens: tokens, including those after the last whole sample.
        num_samples: non-overlapping windows of ``seq_len + 1`` tokens.
        num_files: files that they come from.
        skipped: files of the folder that are left out.
    """

    source: str
    kind: Literal["text", "tokens"]
    num_tokens: int
    num_samples: int
    num_files: int
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class _Record:
    """The source of the data in a run directory; written last, so its presence means that they are complete."""

    path: str
    kind: str
    fingerprint: str


def check_data(config: TrainConfig) -> DataSummary:
    """Check the data of `config`: all files of a text, or all ids of a token file.

    Raises:
        DataError: the data is missing, empty, shorter than one sample, or does not fit the vocabulary.
    """
    text = None
    if _kind(config) == "tokens":
        tokens = _open_source(config)
        check_ids(tokens, config.model.vocab_size, source=_source_name(config))
        num_tokens = tokens.size
    else:
        text = _find_source_text(config, config.output_dir)
        num_tokens = text.num_bytes
    return DataSummary(
        source=_source_name(config),
        kind=_kind(config),
        num_tokens=num_tokens,
        num_samples=num_tokens // (config.model.seq_len + 1),
        num_files=1 if text is None else len(text.files),
        skipped=() if text is None else text.skipped,
    )


def prepare_data(config: TrainConfig, run_dir: Path, *, may_differ: bool = False) -> Path:
    """Prepare the data of `config` for a run in `run_dir`, and return the file of token ids that will be mapped.

    If that was done before, only check that the data has not changed, unless it `may_differ`. Every host calls it for
    the run directory that it sees. The ids of a token file are not checked; see `check_data`.

    Raises:
        DataError: as `check_data`; or `run_dir` was prepared for other data, or its token file has changed since; or
            the run directory cannot be written.
    """
    text_file = run_dir / "data" / "text.bin"
    if _record_file(run_dir).exists() and not may_differ:
        _open_prepared(config, run_dir)
    else:
        if _kind(config) == "tokens":
            tokens = _open_source(config)
        else:
            text = _find_source_text(config, run_dir)
            _write_atomically(text_file, lambda out: write_text(text, out))
            tokens = open_tokens(text_file, "uint8")
        record = _Record(config.data.path, _kind(config), fingerprint(tokens))
        encoded = (json.dumps(asdict(record), indent=2) + "\n").encode()
        _write_atomically(_record_file(run_dir), lambda out: out.write(encoded))
    return _path(config) if _kind(config) == "tokens" else text_file


def load_tokens(config: TrainConfig) -> Tokens:
    """Return the tokens prepared in ``config.output_dir``, or those of the source if there are none.

    Raises:
        DataError: as `prepare_data`.
    """
    if config.output_dir is not None and _record_file(config.output_dir).exists():
        return _open_prepared(config, config.output_dir)
    if _kind(config) == "tokens":
        return _open_source(config)
    buffer = BytesIO()
    write_text(_find_source_text(config, config.output_dir), buffer)
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def _open_prepared(config: TrainConfig, run_dir: Path) -> Tokens:
    path = _record_file(run_dir)
    try:
        record = _Record(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it to have the data prepared again") from None
    if record.kind != _kind(config) or (record.kind == "text" and record.path != config.data.path):
        raise DataError(
            f"the run in {run_dir} trains on data.path {record.path!r} as {record.kind}, and data.path is now "
            f"{config.data.path!r} as {_kind(config)}: set it back, or begin a new run"
        )
    text_file = run_dir / "data" / "text.bin"
    tokens = _open_source(config) if record.kind == "tokens" else open_tokens(text_file, "uint8")
    if fingerprint(tokens) != record.fingerprint:
        changed = _source_name(config) if record.kind == "tokens" else text_file
        raise DataError(
            f"{changed} has changed since the run in {run_dir} began: bring it back, begin a new run, or continue with "
            "it by --accept-changes data"
        )
    _check_length(config, tokens.size)
    return tokens


def _record_file(run_dir: Path) -> Path:
    return run_dir / "data" / "source.json"


def _kind(config: TrainConfig) -> Literal["text", "tokens"]:
    if config.data.format != "auto":
        return config.data.format
    return "tokens" if Path(config.data.path).suffix in _TOKEN_SUFFIXES else "text"


def _path(config: TrainConfig) -> Path:
    return Path(config.data.path).expanduser()


def _source_name(config: TrainConfig) -> str:
    return f"data.path {_path(config)}" if config.data.path else "the source text of Python's standard library"


def _open_source(config: TrainConfig) -> Tokens:
    if not config.data.path:
        raise DataError('data.format is "tokens", and data.path is empty: name a token file')
    tokens = open_tokens(_path(config), config.data.dtype)
    _check_length(config, tokens.size)
    return tokens


def _find_source_text(config: TrainConfig, run_dir: Path | None) -> TextFiles:
    if config.model.vocab_size < BYTE_VOCABULARY:
        raise DataError(
            f"model.vocab_size is {config.model.vocab_size}, and text is read as bytes: set it to {BYTE_VOCABULARY}"
        )

    def is_run(folder: Path) -> bool:
        # Run directories may be below the folder of the text, and no run may train on the files of a run.
        return _record_file(folder).exists() or (run_dir is not None and folder.resolve() == run_dir.resolve())

    text = find_text(_path(config) if config.data.path else None, is_excluded=is_run)
    _check_length(config, text.num_bytes)
    return text


def _check_length(config: TrainConfig, num_tokens: int) -> None:
    needed = config.model.seq_len + 1
    if num_tokens < needed:
        raise DataError(
            f"{_source_name(config)} has {num_tokens} tokens, and one sample takes model.seq_len + 1 = {needed}: "
            "give more data, or lower model.seq_len"
        )


def _write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    # Each process has its own draft. Processes that prepare the same run write equal files, and the last one wins.
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as out:
            write(out)
        draft.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): free some space or name another --output-dir"
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink()
