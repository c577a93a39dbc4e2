"""The tokens that a run trains on: checked before anything starts, then the same for all processes and for good.

Text is written into the run directory once, as bytes; the workers, `verify` and a resumed run all map that file, so
that they see the same samples even after the text has changed. A token file is used where it lies, and recognised by
its fingerprint.
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

__all__ = ["DataSummary", "check_data", "load_tokens", "prepare_data"]

_TOKEN_SUFFIXES = frozenset({".bin", ".npy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What a configuration says to train on, as it was found.

    Attributes:
        source: where it comes from, in words for a reader.
        kind: ``text`` (a byte is a token) or ``tokens``.
        num_tokens: all of them, those after the last whole sample included.
        num_samples: windows of ``seq_len + 1`` tokens that do not overlap.
        num_files: files that they come from.
        skipped: files of the folder that are left out, and why.
    """

    source: str
    kind: Literal["text", "tokens"]
    num_tokens: int
    num_samples: int
    num_files: int
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class _Record:
    """What a run directory says of its data; written last, so that its presence means that the rest is there."""

    path: str
    kind: str
    fingerprint: str


def check_data(config: TrainConfig) -> DataSummary:
    """Look at the data of `config`: all of a text or a folder, every id of a token file whose type allows bad ones.

    Raises:
        DataError: the data is missing, empty, shorter than one sample, or does not fit the vocabulary.
    """
    if _kind(config) == "tokens":
        tokens = _open_source(config)
        check_ids(tokens, config.model.vocab_size, source=_source_name(config))
        return _summary(config, num_tokens=tokens.size, num_files=1)
    text = _find_source_text(config, config.output_dir)
    return _summary(config, num_tokens=text.num_bytes, num_files=len(text.files), skipped=text.skipped)


def prepare_data(config: TrainConfig, run_dir: Path) -> Path:
    """Make the data of `config` ready for a run in `run_dir` and return the file of token ids that will be mapped.

    Does nothing if that was done before. On several hosts, each calls it for the run directory that it sees. The ids of
    a token file are not looked at: that is for `check_data`, once.

    Raises:
        DataError: as `check_data`; or `run_dir` was prepared for other data, or its token file has changed since; or
            the run directory cannot be written.
    """
    if _is_prepared(run_dir):
        _open_prepared(config, run_dir)
    else:
        _prepare(config, run_dir)
    return _path(config) if _kind(config) == "tokens" else _text_file(run_dir)


def load_tokens(config: TrainConfig) -> Tokens:
    """The tokens to train on: those prepared in ``config.output_dir``, or without such a run, the source's own.

    Raises:
        DataError: as `prepare_data`.
    """
    if config.output_dir is not None and _is_prepared(config.output_dir):
        return _open_prepared(config, config.output_dir)
    if _kind(config) == "tokens":
        return _open_source(config)
    buffer = BytesIO()
    write_text(_find_source_text(config, config.output_dir), buffer)
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def _prepare(config: TrainConfig, run_dir: Path) -> None:
    if _kind(config) == "tokens":
        tokens = _open_source(config)
    else:
        text = _find_source_text(config, run_dir)
        _write_atomically(_text_file(run_dir), lambda out: write_text(text, out))
        tokens = open_tokens(_text_file(run_dir), "uint8")
    record = _Record(config.data.path, _kind(config), fingerprint(tokens))
    encoded = (json.dumps(asdict(record), indent=2) + "\n").encode()
    _write_atomically(_record_file(run_dir), lambda out: out.write(encoded))


def _open_prepared(config: TrainConfig, run_dir: Path) -> Tokens:
    record = _read_record(_record_file(run_dir))
    if record.kind != _kind(config) or (record.kind == "text" and record.path != config.data.path):
        raise DataError(
            f"the run in {run_dir} trains on data.path {record.path!r} as {record.kind}, and data.path is now "
            f"{config.data.path!r} as {_kind(config)}: set it back, or begin a new run"
        )
    tokens = _open_source(config) if record.kind == "tokens" else open_tokens(_text_file(run_dir), "uint8")
    if fingerprint(tokens) != record.fingerprint:
        changed = _source_name(config) if record.kind == "tokens" else _text_file(run_dir)
        raise DataError(f"{changed} has changed since the run in {run_dir} began: bring it back, or begin a new run")
    _check_length(config, tokens.size)
    return tokens


def _read_record(path: Path) -> _Record:
    try:
        return _Record(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it to have the data prepared again") from None


def _is_prepared(run_dir: Path) -> bool:
    return _record_file(run_dir).exists()


def _record_file(run_dir: Path) -> Path:
    return run_dir / "data" / "source.json"


def _text_file(run_dir: Path) -> Path:
    return run_dir / "data" / "text.bin"


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
        # Runs may well lie below the folder they train on: they must not train on what they write, nor on each other.
        return _is_prepared(folder) or (run_dir is not None and folder.resolve() == run_dir.resolve())

    text = find_text(_path(config) if config.data.path else None, passed_over=is_run)
    _check_length(config, text.num_bytes)
    return text


def _check_length(config: TrainConfig, num_tokens: int) -> None:
    needed = config.model.seq_len + 1
    if num_tokens < needed:
        raise DataError(
            f"{_source_name(config)} has {num_tokens} tokens, and one sample takes model.seq_len + 1 = {needed}: "
            "give more data, or lower model.seq_len"
        )


def _summary(
    config: TrainConfig, *, num_tokens: int, num_files: int, skipped: tuple[SkippedFile, ...] = ()
) -> DataSummary:
    return DataSummary(
        source=_source_name(config),
        kind=_kind(config),
        num_tokens=num_tokens,
        num_samples=num_tokens // (config.model.seq_len + 1),
        num_files=num_files,
        skipped=skipped,
    )


def _write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    # The name is the process's own: two that prepare the same run at once write the same bytes, and either may win.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            write(out)
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}): free some space or name another --output-dir"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()
