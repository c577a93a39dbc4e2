"""Tokenised corpora: the library's ids of every document, whatever reads, cuts and writes them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer

from chameleon_ft.cli import main
from chameleon_ft.config import Data, LlamaConfig, TrainConfig
from chameleon_ft.data import check_data, load_sources, open_corpus, prepare_data
from chameleon_ft.data import tokenize as tokenizing
from chameleon_ft.data.samples import TokenWindows
from chameleon_ft.data.shards import ShardFolder, new_folder
from chameleon_ft.data.tokenize import tokenize
from chameleon_ft.errors import DataError
from tests.data.tokenizers import TEXT, make_tokenizer
from tests.golden import golden, refused

DOCUMENTS = ["the dog", TEXT, "größer than the fox", "x" * 100, "over\n\nthe lazy dog "]
SEPARATOR = "<|endoftext|>"


def expected(tokenizer: Path, documents: list[str]) -> list[int]:
    """The ids as the library gives them, with the end of each document."""
    library = Tokenizer.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    end = library.token_to_id("<|endoftext|>")
    assert end is not None
    return [id_ for text in documents for id_ in [*library.encode(text).ids, end]]


def read(folder: Path) -> list[int]:
    """The ids of a folder, read without our code."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return [
        id_ for shard in manifest["shards"] for id_ in np.fromfile(folder / shard["file"], manifest["dtype"]).tolist()
    ]


def text_files(folder: Path) -> list[Path]:
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return [folder]


def separated(folder: Path) -> list[Path]:
    (folder / "all.txt").write_text(SEPARATOR.join([*DOCUMENTS, "\n"]), encoding="utf-8")
    return [folder / "all.txt"]


def json_lines(folder: Path) -> list[Path]:
    rows = [{"text": text, "n": 1} for text in DOCUMENTS] + [{"text": None}, {"text": ""}]
    lines = "\n\n".join(json.dumps(row) for row in rows).encode()
    (folder / "a.jsonl").write_bytes(lines)
    return [folder / "a.jsonl"]


def compressed(folder: Path) -> list[Path]:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(folder)[0].read_bytes()))
    return [folder / "a.jsonl.gz"]


def parquet(folder: Path) -> list[Path]:
    pyarrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"n": list(range(6)), "text": [*DOCUMENTS, None]})
    writer.write_table(table, folder / "a.parquet", row_group_size=2)
    return [folder / "a.parquet"]


@pytest.mark.parametrize("write", [text_files, separated, json_lines, compressed, parquet])
def test_every_kind_of_file_gives_the_ids_of_its_documents(tmp_path: Path, write: Any) -> None:
    (tmp_path / "in").mkdir()
    inputs, tokenizer = write(tmp_path / "in"), make_tokenizer(tmp_path)
    separator = SEPARATOR if write is separated else ""
    manifest = tokenize(inputs, tmp_path / "out", tokenizer=tokenizer, separator=separator, shard_tokens=50)
    ids = expected(tokenizer, DOCUMENTS)

    assert read(tmp_path / "out") == ids
    assert (manifest.tokens, manifest.documents, manifest.dtype) == (len(ids), len(DOCUMENTS), "uint16")
    assert [shard.tokens for shard in manifest.shards[:-1]] == [50] * (len(ids) // 50)
    folder = ShardFolder.open(tmp_path / "out")
    folder.verify()
    assert folder.tokens[:].tolist() == ids
    # The positions of the documents.
    bounds = [*folder.starts.tolist(), len(ids)]
    parts = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert parts == [expected(tokenizer, [text]) for text in DOCUMENTS]


def test_long_documents_are_cut_at_lines_and_batches_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    words = ["the", "dog", "fox", "\n", "größer", " ", "<|end", "oftext|"]
    documents = ["".join(draw.choices(words, k=draw.randrange(1, 400))) for _ in range(60)]
    documents = [text for text in documents if text.strip() and SEPARATOR not in text]
    assert len(documents) > 20
    (tmp_path / "a.txt").write_text(SEPARATOR.join(documents), encoding="utf-8")
    tokenizer = make_tokenizer(tmp_path)
    for chars in (50, 173, 1 << 20):
        monkeypatch.setattr(tokenizing, "_PIECE_CHARS", chars)
        monkeypatch.setattr(tokenizing, "_BATCH_CHARS", chars)
        out = tmp_path / f"out{chars}"
        manifest = tokenize([tmp_path / "a.txt"], out, tokenizer=tokenizer, separator=SEPARATOR)
        library = Tokenizer.from_file(str(tokenizer))
        bounds = [*ShardFolder.open(out).starts.tolist(), manifest.tokens]
        ids = read(out)
        parts = [ids[begin : end - 1] for begin, end in itertools.pairwise(bounds)]
        # Where a document is cut, tokens may differ, but not the text.
        pieces = [bytes(_bytes_of(library, part)).decode() for part in parts]
        assert pieces == documents
    assert ids == expected(tokenizer, documents)


def _bytes_of(library: Tokenizer, ids: list[int]) -> list[int]:
    # The alphabet of byte-level BPE, as GPT-2 defines it.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return [table[char] for id_ in ids for char in library.id_to_token(id_) or ""]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fox \\ud83d dog"}')
    tokenizer = make_tokenizer(tmp_path)
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert read(tmp_path / "out") == expected(tokenizer, ["fox \ufffd dog"])


@pytest.mark.multiprocess
def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 40)
    text_files(tmp_path)
    tokenizer = make_tokenizer(tmp_path)
    inputs = sorted(tmp_path.glob("*.txt"))
    for processes in (1, 3):
        tokenize(inputs, tmp_path / str(processes), tokenizer=tokenizer, shard_tokens=64, processes=processes)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "3").iterdir())
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes() for name in names)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_that_looks_complete(tmp_path: Path, number: int) -> None:
    tokenizer, out = make_tokenizer(tmp_path), tmp_path / "out"
    pipe = tmp_path / "pipe"
    (tmp_path / "a.txt").write_text(TEXT)
    os.mkfifo(pipe)
    arguments = ["data", "tokenize", str(tmp_path / "a.txt"), str(pipe), "--tokenizer", str(tokenizer)]
    arguments += ["--out", str(out), "--processes", "1"]
    run = subprocess.Popen([sys.executable, "-m", "chameleon_ft", *arguments], stderr=subprocess.DEVNULL)
    with pipe.open("w") as feed:
        # It reads the pipe, so it has begun.
        feed.write("the dog")
        feed.flush()
        with refused(DataError), new_folder(out):
            pass
        run.send_signal(number)
        run.wait(60)
    assert not out.exists()
    assert out.with_name("out.partial").exists() == (number == signal.SIGKILL)
    pipe.unlink()
    assert main([*arguments[:3], *arguments[4:]]) == 0
    assert read(out) == expected(tokenizer, [TEXT])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out", "tokenizer.json"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    tokenize(json_lines(tmp_path), tmp_path / "corpus", tokenizer=make_tokenizer(tmp_path), shard_tokens=60)
    return tmp_path / "corpus"


def config_of(corpus: Path, **model: int) -> TrainConfig:
    shape = LlamaConfig.model_validate({"vocab_size": 300, "seq_len": 7, **model})
    return TrainConfig(data=Data(path=str(corpus)), model=shape, output_dir=corpus.parent / "run")


def test_a_run_trains_on_a_folder_of_shards_as_on_one_file(corpus: Path) -> None:
    config, ids = config_of(corpus), read(corpus)
    summary = check_data(config)
    assert (summary.kind, summary.num_tokens, summary.num_files) == ("tokens", len(ids), -(-len(ids) // 60))
    (tokens,) = load_sources(config)
    shards, whole = TokenWindows(tokens, 7), TokenWindows(np.array(ids, np.uint16), 7)
    pickled = pickle.dumps(shards)
    assert len(pickled) < 2000
    assert len(shards) == len(whole) == summary.num_samples
    for index in range(len(whole)):
        for copy in (shards, pickle.loads(pickled)):
            assert [part.tolist() for part in copy[index]] == [part.tolist() for part in whole[index]]


def test_a_sample_may_tell_its_documents(corpus: Path) -> None:
    ids, packed = read(corpus), open_corpus(corpus, 30, document_ids=True)
    end = ids[-1]
    for copy in (packed, pickle.loads(pickle.dumps(packed))):
        for index in range(len(packed)):
            sample = {name: values.tolist() for name, values in copy[index].items()}
            window = ids[31 * index : 31 * (index + 1)]
            assert sample["input_ids"] == window[:-1]
            # A new document begins after each end.
            assert sample["document_ids"] == np.cumsum([0, *(token == end for token in window[:-2])]).tolist()
            assert sample["labels"] == [-100 if token == end else after for token, after in pairwise(window)]
    plain = open_corpus(corpus, 30)
    assert plain[1][0].tolist() == ids[31:61]
    (corpus.parent / "poem.txt").write_text("some lines of text")
    assert bytes(open_corpus(corpus.parent / "poem.txt", 4)[1][0].tolist()) == b"line"
    with refused(DataError):
        open_corpus(corpus.parent / "poem.txt", 4, document_ids=True)


def test_a_corpus_of_more_ids_than_the_model_has_is_refused(corpus: Path) -> None:
    with refused(DataError):
        check_data(config_of(corpus, vocab_size=299))


def test_a_run_does_not_continue_on_other_shards(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus)
    prepare_data(config, tmp_path / "run")
    prepare_data(config, tmp_path / "run")
    rows = json.dumps({"text": "x" * 400})
    (tmp_path / "b.jsonl").write_text(rows)
    corpus.rename(tmp_path / "before")
    tokenize([tmp_path / "b.jsonl"], corpus, tokenizer=tmp_path)
    with refused(DataError):
        prepare_data(config, tmp_path / "run")


def test_damage_is_found(corpus: Path) -> None:
    shard = corpus / "00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:50] + b"\1\0" + whole[52:])
    ShardFolder.open(corpus)
    with refused(DataError):
        ShardFolder.open(corpus).verify()
    shard.write_bytes(whole[:-2])
    with refused(DataError):
        ShardFolder.open(corpus)
    shard.unlink()
    with refused(DataError):
        ShardFolder.open(corpus)
    (corpus / "manifest.json").write_text("{}")
    with refused(DataError):
        ShardFolder.open(corpus)


def test_checksums_are_those_of_xxh3(corpus: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    found = {shard["file"]: shard["checksum"] for shard in manifest["shards"]}
    found |= {"documents.bin": manifest["starts"], "tokenizer.json": manifest["tokenizer"]}
    assert found == {name: xxhash.xxh3_128_hexdigest((corpus / name).read_bytes()) for name in found}


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}', {}),
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}', {}),
        ("a.jsonl", b'{"text": "x"}\n["x"]', {}),
        ("a.jsonl", b'{"text": "x"}\n{"text', {}),
        ("a.jsonl.gz", b"no gzip", {}),
        ("a.parquet", b"no Parquet file", {}),
        ("a.txt", b"\xff\xfe", {}),
        ("a.txt", b" \n", {}),
        ("a.zip", b"PK", {}),
        ("a.txt", b"x", {"end_of_document": "<eos>"}),
        ("a.txt", b"x", {"tokenizer": Path("none.json")}),
    ],
)
def test_an_input_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(DataError):
        tokenize([tmp_path / name], tmp_path / "out", **{"tokenizer": make_tokenizer(tmp_path), **options})
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with refused(DataError):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "a.txt")
    with refused(DataError):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer=make_tokenizer(tmp_path, end="[END]"))
    with refused(DataError):
        tokenize([tmp_path / "b.txt"], tmp_path / "out", tokenizer=tmp_path)
    (tmp_path / "empty").mkdir()
    with refused(DataError):
        tokenize([tmp_path / "empty"], tmp_path / "out", tokenizer=tmp_path)


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, table = make_tokenizer(tmp_path), tmp_path / "a.parquet"
    table.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(DataError):
        tokenize([table], tmp_path / "out", tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(DataError):
        tokenize(json_lines(tmp_path), tmp_path / "out", tokenizer=tokenizer)


def test_the_commands_say_what_there_is(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    (tmp_path / "a.txt").write_text("a text")
    written = ["a.jsonl", "--tokenizer", "tokenizer.json", "--out", "other", "--processes", "1"]
    for arguments, code in (
        (["tokenize", *written], 0),
        (["tokenize", *written], 2),
        (["inspect", "other"], 0),
        (["inspect", "corpus", "--verify"], 0),
        (["inspect", "ids.bin"], 0),
        (["inspect", "a.jsonl"], 2),
        (["inspect", "a.txt"], 0),
        (["inspect", "ids.bin", "--verify"], 2),
        (["inspect", "nothing"], 2),
        (["tokenise"], 2),
        ([], 2),
        (["--help"], 0),
    ):
        assert main(["data", *arguments]) == code
    shown = capsys.readouterr()
    golden("data_commands.txt", shown.out + shown.err)


def test_tokenising_loads_no_torch() -> None:
    code = "import sys, chameleon_ft.data.tokenize; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
