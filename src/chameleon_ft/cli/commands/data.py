"""`chameleon data`: tokenise a corpus, and look at one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from chameleon_ft.cli.arguments import metavar, parse_arguments
from chameleon_ft.cli.output import progress_bar
from chameleon_ft.errors import ConfigError
from chameleon_ft.quantities import counted


@checked(frozen=True, kw_only=True)
class TokenizeArguments:
    """Tokenise text files, JSON lines and Parquet files into memory-mapped shards, for data.path of a run.

    Documents are read in the order of the arguments and of the names in folders, and each is followed by the
    end-of-document token. The result does not depend on the number of processes. The folder appears when it is
    complete; after a stop, the same command begins anew.
    """

    inputs: Annotated[Sequence[Path], metavar("INPUT")]
    """Files, and folders of files."""
    tokenizer: Path
    """A tokenizer.json, or a folder with one."""
    out: Path
    """The folder to write, which must not exist."""
    text_field: str = "text"
    """Field of the text in rows of JSON lines and Parquet files."""
    separator: str = ""
    """Text between two documents of a text file; without it, each file is a document."""
    end_of_document: str = ""
    """Token after each document; by default the usual one of the tokenizer, such as <|endoftext|>."""
    shard_tokens: Annotated[int, Field(ge=1)] = 1 << 27
    """Tokens of a shard."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Processes that encode; 0: one for each processor."""


@dataclass(frozen=True)
class InspectArguments:
    """Tell what a corpus is, and how many tokens it has: a folder of shards, token files, or text."""

    path: Path
    """As data.path."""
    dtype: str = "uint16"
    """As data.dtype: type of the ids in a raw token file."""
    verify: bool = False
    """Compare the files of a folder of shards with their checksums."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in SUBCOMMANDS:
        raise ConfigError(f"{name or 'nothing'!r} is none of {', '.join(SUBCOMMANDS)}; see chameleon data --help")
    return SUBCOMMANDS[name](rest)


def _help() -> str:
    return """\
usage: chameleon data {tokenize,inspect} [ARGUMENT ...]

  tokenize  Tokenise text files, JSON lines and Parquet files into shards.
  inspect   Tell what a corpus is, and how many tokens it has.

`chameleon data tokenize --help` explains the one, and so on."""


def _tokenize(arguments: Sequence[str]) -> int:
    given = parse_arguments(TokenizeArguments, arguments, command="data tokenize", positional=("inputs",))
    from chameleon_ft.data.tokenize import Progress, tokenize

    with progress_bar(1.0) as show:

        def say(progress: Progress) -> None:
            done = progress.bytes_begun / max(1, progress.bytes_total)
            show(done, f"{counted(progress.documents, 'document')}, {progress.tokens:,} tokens")

        manifest = tokenize(
            given.inputs,
            given.out,
            tokenizer=given.tokenizer,
            text_field=given.text_field,
            separator=given.separator,
            end_of_document=given.end_of_document,
            shard_tokens=given.shard_tokens,
            processes=given.processes or len(os.sched_getaffinity(0)),
            progress=say,
        )
    print(f"{given.out}: {manifest.describe()}")
    return 0


def _inspect(arguments: Sequence[str]) -> int:
    given = parse_arguments(InspectArguments, arguments, command="data inspect", positional=("path",))
    from chameleon_ft.data.corpus import describe_path

    for line in describe_path(given.path, given.dtype, verify=given.verify):
        print(line)
    return 0


SUBCOMMANDS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = {"tokenize": _tokenize, "inspect": _inspect}
