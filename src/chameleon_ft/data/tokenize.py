"""Texts to tokenised corpora: documents are read in order, encoded by several processes, and written in order."""

from __future__ import annotations

import gzip
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import numpy as np

from chameleon_ft.data.shards import Manifest, ShardWriter, new_folder, require_free
from chameleon_ft.data.text import walk
from chameleon_ft.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from chameleon_ft.data.token_files import TokenArray

Piece: TypeAlias = tuple[str, bool]
"""A part of a document, and whether the document ends after it."""
_Encoded: TypeAlias = "tuple[TokenArray, np.ndarray[tuple[int], np.dtype[np.int64]]]"

_PIECE_CHARS: Final = 1 << 20
"""Longer documents of text files are cut at ends of lines, so that memory is bounded."""
_BATCH_CHARS: Final = 1 << 20
_BATCHES_AHEAD: Final = 3
"""Batches that are read ahead, for each process."""
_END_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_JSON_LINES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_REFUSED: Final = (".zst", ".bz2", ".xz", ".zip", ".tar", ".bin", ".npy", ".arrow", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is: documents and tokens written, and bytes of the inputs begun, out of all."""

    documents: int
    tokens: int
    bytes_begun: int
    bytes_total: int


def tokenize(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: Path,
    text_field: str = "text",
    separator: str = "",
    end_of_document: str = "",
    shard_tokens: int = 1 << 27,
    processes: int = 1,
    progress: Callable[[Progress], object] = lambda _: None,
) -> Manifest:
    """Write the tokens of all documents in `inputs` as shards with a manifest into the new folder `out`.

    The result depends neither on the number of processes nor on the size of shards, but for where a shard ends. Each
    document is followed by the end-of-document token. No other special token is added.

    Args:
        inputs: text files; JSON lines and Parquet files, of which each row is a document; and folders of these. A text
            file is one document, or those between its separators.
        out: folder to write; it must not exist, or be empty.
        tokenizer: ``tokenizer.json``, or a folder with it.
        text_field: field of a row with its text.
        separator: text between two documents of a text file, such as ``<|endoftext|>``; empty: there is none.
        end_of_document: a token of the tokenizer; empty: the usual one that it has.
        shard_tokens: tokens of a shard.
        processes: that encode; the one that reads and writes comes on top.
        progress: called after each batch.

    Raises:
        DataError: an input or the tokenizer cannot be used, there are no documents, or `out` cannot be written.
    """
    files = find_files(inputs)
    encoder = load_tokenizer(tokenizer)
    end_id = _end_id(encoder, tokenizer, end_of_document)
    require_free(out)
    total, begun = sum(file.stat().st_size for file in files), 0

    def pieces() -> Iterator[Piece]:
        nonlocal begun
        for file in files:
            begun += file.stat().st_size
            yield from read_documents(file, text_field=text_field, separator=separator)

    text = encoder.to_str()
    with new_folder(out) as draft:
        vocab_size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
        made = ShardWriter(draft, vocab_size=vocab_size, end_of_document=end_id, shard_tokens=shard_tokens)
        with closing(made) as writer:
            for ids, ends in _encoded(_batches(pieces()), text, end_id, processes):
                writer.add(ids, ends)
                progress(
                    Progress(documents=writer.documents, tokens=writer.tokens, bytes_begun=begun, bytes_total=total)
                )
            if not writer.documents:
                raise DataError(f"{', '.join(map(str, inputs))}: there are no documents with text in them")
            return writer.finish(text)


# --- the tokenizer -------------------------------------------------------------------------------------------------


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer, without padding and truncation. Raises DataError if there is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError('tokenizers is not installed: pip install "chameleon-ft[data]"') from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"--tokenizer {path}: there is no {file.name}; give a tokenizer.json or a folder with one")
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001
        # The library raises Exception itself.
        raise DataError(f"--tokenizer {path}: is not a tokenizer of the library tokenizers ({error})") from None
    found.no_padding()
    found.no_truncation()
    return found


def _end_id(tokenizer: Tokenizer, path: Path, token: str) -> int:
    known = map(tokenizer.token_to_id, (token,) if token else _END_TOKENS)
    found = next((each for each in known if each is not None), None)
    if found is None:
        special = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        named = f"{', '.join(special[:8])}{', ...' if special[8:] else ''}" or "none"
        missing = f"has no token {token!r}" if token else "has no usual end-of-document token"
        raise DataError(f"--tokenizer {path}: {missing}; name one by --end-of-document (its special tokens: {named})")
    return found


# --- documents -----------------------------------------------------------------------------------------------------


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and those of folders in the order of their names. Raises DataError."""
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise DataError(f"{path} does not exist: give text files, JSON lines, Parquet files or folders of these")
        files += (each for each in walk(path, lambda _: False) if each.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.name.endswith(_REFUSED):
            raise DataError(
                f"{file}: documents are read from text files, JSON lines (.jsonl, .ndjson), both also as .gz, and "
                "Parquet files (.parquet); convert it, or leave it out"
            )
    if not files:
        raise DataError(f"{', '.join(map(str, inputs))}: there are no files")
    return files


def read_documents(file: Path, *, text_field: str, separator: str) -> Iterator[Piece]:
    """Yield the documents of a file in pieces. Blank ones are left out. Raises DataError."""
    try:
        if file.suffix == ".parquet":
            yield from _whole(_parquet_texts(file, text_field))
            return
        with _opened(file) as stream:
            if file.name.endswith(_JSON_LINES):
                yield from _whole(_json_texts(file, stream, text_field))
            else:
                with TextIOWrapper(stream, encoding="utf-8", newline="") as text:
                    yield from _text_pieces(text, separator)
    except (OSError, EOFError) as error:
        raise DataError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text: convert it, or leave it out") from None


def _opened(file: Path) -> BinaryIO:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def _whole(texts: Iterable[str]) -> Iterator[Piece]:
    return ((text, True) for text in texts if text and not text.isspace())


def _text_pieces(stream: TextIOWrapper, separator: str) -> Iterator[Piece]:
    rest, is_open = "", False

    def document(text: str) -> Iterator[Piece]:
        if is_open or (text and not text.isspace()):
            yield text, True

    while block := stream.read(_PIECE_CHARS):
        rest += block
        if separator:
            *documents, rest = rest.split(separator)
            for text in documents:
                yield from document(text)
                is_open = False
        if len(rest) > _PIECE_CHARS:
            # The end of it may be the beginning of a separator.
            most = len(rest) - len(separator)
            cut = rest.rfind("\n", 0, most) + 1 or most
            yield rest[:cut], False
            rest, is_open = rest[cut:], True
    yield from document(rest)


def _json_texts(file: Path, stream: Iterable[bytes], field: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number}: is not JSON ({error}); correct it, or leave it out") from None
        if not isinstance(row, dict) or field not in row:
            names = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(f"{file}, line {number}: has no field {field!r} but {names}; name one by --text-field")
        yield _text_of(row[field], f"{file}, line {number}")


def _parquet_texts(file: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError('pyarrow is not installed: pip install "chameleon-ft[data]"') from None
    try:
        with ParquetFile(file) as table:
            if field not in (names := table.schema_arrow.names):
                raise DataError(f"{file} has no field {field!r} but {', '.join(names)}; name one by --text-field")
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text_of(value, f"{file}, row {row}")
    except ArrowException as error:
        raise DataError(f"{file} is not a Parquet file that can be read ({error})") from None


def _text_of(value: Any, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}: its text is a {type(value).__name__}; name another field by --text-field")
    # JSON can hold half of a surrogate pair, which is no character.
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- encoding ------------------------------------------------------------------------------------------------------


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[list[Piece]], tokenizer: str, end_id: int, processes: int) -> Iterator[_Encoded]:
    if processes == 1:
        _begin(tokenizer, end_id)
        yield from map(_encode, batches)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (tokenizer, end_id))
    try:
        pending: deque[Future[_Encoded]] = deque(
            pool.submit(_encode, batch) for batch in islice(batches, _BATCHES_AHEAD * processes)
        )
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(_encode, batch) for batch in islice(batches, 1))
    except BrokenProcessPool:
        raise DataError("a process that encodes was killed, maybe for memory: take fewer --processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Tokenizer
_end: int


def _begin(tokenizer: str, end_id: int) -> None:
    """Load the tokenizer once in each process that encodes."""
    global _encoder, _end
    # The library would start a thread for each processor, in each process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _encoder, _end = Tokenizer.from_str(tokenizer), end_id


def _encode(batch: list[Piece]) -> _Encoded:
    """Return the ids of a batch, and the positions at which its documents end."""
    encodings = _encoder.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
    parts, ends, length = list[Any](), list[int](), 0
    for encoding, (_, is_end) in zip(encodings, batch, strict=True):
        ids = encoding.ids
        parts.append(np.array([*ids, _end] if is_end else ids, np.uint32))
        length += len(parts[-1])
        if is_end:
            ends.append(length)
    return np.concatenate(parts), np.array(ends, np.int64)
