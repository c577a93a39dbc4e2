"""The tokens of a run: checked before it starts, then fixed, and the same in all processes.

A text has one token per byte. It is copied once into the run directory; the workers, `verify` and a resumed run map
this file, so they see the same samples even if the source has changed. Files of token ids are mapped in place, and
recognised by their fingerprint. Processes share the pages of a map and read only what they need.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeAlias

from chameleon_ft.data.shards import ShardFolder, is_shard_folder
from chameleon_ft.data.text import BYTE_VOCABULARY, SkippedFile, TextFiles, find_text, read_text, write_text
from chameleon_ft.data.token_files import Tokens, TokenShards, check_ids, files_of_pattern, fingerprint, open_tokens
from chameleon_ft.errors import DataError

if TYPE_CHECKING:
    from chameleon_ft.config import TrainConfig

Kind: TypeAlias = Literal["text", "tokens"]
_TOKEN_SUFFIXES: Final = frozenset({".bin", ".npy"})
_DOCUMENT_SUFFIXES: Final = (".jsonl", ".ndjson", ".parquet", ".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The data that a configuration names.

    Attributes:
        source: description.
        kind: ``text`` (a byte is a token), ``tokens`` or ``mixture``.
        num_tokens: tokens, including those after the last whole sample.
        num_samples: non-overlapping windows of ``seq_len + 1`` tokens.
        num_files: files that they come from.
        skipped: files of the folder that are left out.
    """

    source: str
    kind: Literal["text", "tokens", "mixture"]
    num_tokens: int
    num_samples: int
    num_files: int
    skipped: tuple[SkippedFile, ...] = ()


def kind_of(path: Path) -> Kind:
    """Return whether a path names token ids, by its ending or by what is there, or text.

    Raises:
        DataError: it is a folder with token files in it, of which one has to be named; or a file of documents that are
            not plain text.
    """
    if path.suffix in {*_TOKEN_SUFFIXES, ".idx"} or is_shard_folder(path) or _is_megatron_prefix(path):
        return "tokens"
    if path.is_file() and path.name.endswith(_DOCUMENT_SUFFIXES):
        raise DataError(
            f"data.path {path} has documents that are not plain text: make tokens of them by `chameleon data "
            'tokenize`; or set data.format to "text" to train on the bytes of the file as they are'
        )
    if path.is_dir() and (files := sorted(each.name for each in path.glob("*") if each.suffix in _TOKEN_SUFFIXES)):
        raise DataError(
            f"data.path {path} is a folder with token files ({', '.join(files[:3])}{', ...' if files[3:] else ''}): "
            f'name one, or several by a pattern, such as {path / "*train*.bin"}; or set data.format to "text" to train '
            "on the text beside them"
        )
    return "text"


def open_path(path: Path, dtype: str) -> Tokens:
    """Map the token ids that `path` names.

    It is a file of `open_tokens`; the prefix of two files of Megatron-LM; a pattern of several files, in the order of
    their names; or a folder of `chameleon data tokenize`, which knows its type.

    Raises:
        DataError: as `open_tokens` and `ShardFolder.open`; or no file has the pattern, or their types differ.
    """
    if is_shard_folder(path):
        return ShardFolder.open(path).tokens
    if _is_megatron_prefix(path):
        return open_tokens(path.with_name(f"{path.name}.bin"), dtype)
    if files := files_of_pattern(path):
        arrays = [open_tokens(file, dtype) for file in files]
        if len({array.dtype for array in arrays}) > 1:
            raise DataError(f"data.path {path} names files with ids of several types: write them with one")
        return TokenShards(arrays)
    return open_tokens(path, dtype)


def describe_path(path: Path, dtype: str, *, verify: bool = False) -> Iterator[str]:
    """Yield lines that say what a corpus is. Raises DataError if it cannot be used, or a checksum does not fit."""
    if is_shard_folder(path):
        folder = ShardFolder.open(path)
        yield f"{path}: {folder.manifest.describe()}"
        yield f"tokenizer {folder.manifest.tokenizer}; a document ends with token {folder.manifest.end_of_document}"
        if verify:
            folder.verify()
            yield "all files have their checksums"
        return
    if verify:
        raise DataError(f"--verify {path}: only the shards of `chameleon data tokenize` have checksums; leave it out")
    if kind_of(path) == "text":
        text = find_text(path)
        yield f"{path}: text of {text.num_bytes:,} bytes, each of them a token, in {len(text.files):,} files"
        yield from (f"left out: {each.path} {each.reason}" for each in text.skipped)
        return
    tokens = open_path(path, dtype)
    files = f", in {tokens.num_arrays:,} files" if isinstance(tokens, TokenShards) else ""
    yield f"{path}: {tokens.size:,} tokens of {tokens.dtype.name}{files}"


def _is_megatron_prefix(path: Path) -> bool:
    return not path.exists() and all(path.with_name(f"{path.name}.{each}").is_file() for each in ("bin", "idx"))


@dataclass(frozen=True, slots=True)
class _Source:
    """One source of a configuration: its path, its type, and how messages name it."""

    path: str
    kind: Kind
    config: TrainConfig
    text_name: str

    @property
    def place(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def name(self) -> str:
        return f"data.path {self.place}" if self.path else "the source text of Python's standard library"

    def open_tokens(self) -> Tokens:
        if not self.path:
            raise DataError('data.format is "tokens", and data.path is empty: name a token file')
        tokens = open_path(self.place, self.config.data.dtype)
        self.check_length(tokens.size)
        return tokens

    def check_ids(self, tokens: Tokens) -> None:
        vocab_size = self.config.model.vocab_size
        if not is_shard_folder(self.place):
            check_ids(tokens, vocab_size, source=self.name)
        elif (needed := ShardFolder.open(self.place).manifest.vocab_size) > vocab_size:
            raise DataError(
                f"{self.name} has the ids of a tokenizer with {needed:,}, and model.vocab_size is {vocab_size}: set it "
                f"to {needed} or more"
            )

    def find_text(self, run_dir: Path | None) -> TextFiles:
        vocab_size = self.config.model.vocab_size
        if vocab_size < BYTE_VOCABULARY:
            raise DataError(f"model.vocab_size is {vocab_size}, and text is read as bytes: set it to {BYTE_VOCABULARY}")

        def is_run(folder: Path) -> bool:
            # Run directories may be below the folder of the text, and no run may train on the files of a run.
            return _record_file(folder).exists() or (run_dir is not None and folder.resolve() == run_dir.resolve())

        text = find_text(self.place if self.path else None, is_excluded=is_run)
        self.check_length(text.num_bytes)
        return text

    def check_length(self, num_tokens: int) -> None:
        needed = self.config.model.seq_len + 1
        if num_tokens < needed:
            raise DataError(
                f"{self.name} has {num_tokens} tokens, and one sample takes model.seq_len + 1 = {needed}: "
                "give more data, or lower model.seq_len"
            )

    def fingerprint(self, tokens: Tokens) -> str:
        shards = ShardFolder.open(self.place).manifest.shards if is_shard_folder(self.place) else ()
        return fingerprint(tokens, *(shard.checksum for shard in shards))


def _sources(config: TrainConfig) -> Iterator[_Source]:
    """Yield the sources of a configuration: one, or those of its mixture. Raises DataError."""
    data = config.data
    for number, path in enumerate([each.path for each in data.mixture] or [data.path]):
        kind = data.format if data.format != "auto" else kind_of(Path(path).expanduser()) if path else "text"
        yield _Source(path, kind, config, f"text-{number}.bin" if data.mixture else "text.bin")


@dataclass(frozen=True, slots=True)
class _Record:
    """One source of the data in a run directory."""

    path: str
    kind: str
    fingerprint: str


def check_data(config: TrainConfig) -> DataSummary:
    """Check the data of `config`: all files of a text, all ids of a token file, or the manifest of shards.

    Raises:
        DataError: the data is missing, empty, shorter than one sample, or does not fit the vocabulary.
    """
    found = [_check(source) for source in _sources(config)]
    if not config.data.mixture:
        return found[0]
    return DataSummary(
        source=f"a mixture of {len(found)} sources",
        kind="mixture",
        num_tokens=sum(each.num_tokens for each in found),
        num_samples=sum(each.num_samples for each in found),
        num_files=sum(each.num_files for each in found),
        skipped=tuple(file for each in found for file in each.skipped),
    )


def _check(source: _Source) -> DataSummary:
    skipped: tuple[SkippedFile, ...] = ()
    if source.kind == "tokens":
        tokens = source.open_tokens()
        source.check_ids(tokens)
        num_tokens, files = tokens.size, tokens.num_arrays if isinstance(tokens, TokenShards) else 1
    else:
        text = source.find_text(source.config.output_dir)
        num_tokens, files, skipped = text.num_bytes, len(text.files), text.skipped
    return DataSummary(
        source=source.name,
        kind=source.kind,
        num_tokens=num_tokens,
        num_samples=num_tokens // (source.config.model.seq_len + 1),
        num_files=files,
        skipped=skipped,
    )


def prepare_data(config: TrainConfig, run_dir: Path, *, may_differ: bool = False) -> None:
    """Prepare the data of `config` for a run in `run_dir`: what `load_sources` opens.

    If that was done before, only check that the data has not changed, unless it `may_differ`. Every host calls it for
    the run directory that it sees. The ids of a token file are not checked; see `check_data`.

    Raises:
        DataError: as `check_data`; or `run_dir` was prepared for other data, or its token file has changed since; or
            the run directory cannot be written.
    """
    if _record_file(run_dir).exists() and not may_differ:
        _open_prepared(config, run_dir)
        return
    records = []
    for source in _sources(config):
        if source.kind == "tokens":
            tokens = source.open_tokens()
        else:
            file = run_dir / "data" / source.text_name
            _write_atomically(file, partial(write_text, source.find_text(run_dir)))
            tokens = open_tokens(file, "uint8")
        records.append(asdict(_Record(source.path, source.kind, source.fingerprint(tokens))))
    # Written last, so its presence means that the data is complete.
    encoded = (json.dumps(records if config.data.mixture else records[0], indent=2) + "\n").encode()
    _write_atomically(_record_file(run_dir), lambda out: out.write(encoded))


def load_sources(config: TrainConfig) -> list[Tokens]:
    """Return the tokens of each source as prepared in ``config.output_dir``, or those that are there now if none are.

    Raises:
        DataError: as `prepare_data`.
    """
    if config.output_dir is not None and _record_file(config.output_dir).exists():
        return _open_prepared(config, config.output_dir)
    return [
        source.open_tokens() if source.kind == "tokens" else read_text(source.find_text(config.output_dir))
        for source in _sources(config)
    ]


def _open_prepared(config: TrainConfig, run_dir: Path) -> list[Tokens]:
    path = _record_file(run_dir)
    try:
        value = json.loads(path.read_bytes())
        records = [_Record(**each) for each in (value if isinstance(value, list) else [value])]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it to have the data prepared again") from None
    sources = list(_sources(config))
    if len(records) != len(sources):
        raise DataError(
            f"the run in {run_dir} trains on {len(records)} sources, and the configuration now has {len(sources)}: set "
            "them back, or begin a new run"
        )
    return [_open_recorded(source, record, run_dir) for source, record in zip(sources, records, strict=True)]


def _open_recorded(source: _Source, record: _Record, run_dir: Path) -> Tokens:
    if record.kind != source.kind or (record.kind == "text" and record.path != source.path):
        raise DataError(
            f"the run in {run_dir} trains on data.path {record.path!r} as {record.kind}, and data.path is now "
            f"{source.path!r} as {source.kind}: set it back, or begin a new run"
        )
    text_file = run_dir / "data" / source.text_name
    tokens: Tokens = source.open_tokens() if record.kind == "tokens" else open_tokens(text_file, "uint8")
    if source.fingerprint(tokens) != record.fingerprint:
        changed = source.name if record.kind == "tokens" else text_file
        raise DataError(
            f"{changed} has changed since the run in {run_dir} began: bring it back, begin a new run, or continue with "
            "it by --accept-changes data"
        )
    source.check_length(tokens.size)
    return tokens


def _record_file(run_dir: Path) -> Path:
    return run_dir / "data" / "source.json"


def _write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
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
