"""Outputs and error messages, compared as a whole with files of `tests/golden`, which `make golden` rewrites.

A test asserts which error is raised, and what else is behaviour; how it is worded is in these files alone.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
_FOLDER: Final = ROOT / "tests" / "golden"
_IS_REWRITTEN: Final = os.environ.get("CHAMELEON_GOLDEN") == "write"

_VARYING: Final = (
    (rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?[\w.-]+?\d+(?![\w.-])", "<tmp>"),
    (rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "<tmp>"),
    (re.escape(str(ROOT)), "<root>"),
    (r"(?<=127\.0\.0\.1:)\d{4,5}\b", "<port>"),
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    (r"\bprocess \d+ on [^\s;,]+", "process <pid> on <host>"),
    (r"(?<=-)\d{8}-\d{6}\b", "<time>"),
    (r"(?m)[ \t]+$", ""),
)


def normalised(text: str) -> str:
    """Return the text without that which differs from one run of a test to the next."""
    for pattern, constant in _VARYING:
        text = re.sub(pattern, constant, text)
    return text


def golden(name: str, text: str) -> None:
    """Compare a whole output with `tests/golden/NAME`."""
    path = _FOLDER / name
    if _IS_REWRITTEN:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(normalised(text), encoding="utf-8")
    assert normalised(text) == path.read_text(encoding="utf-8"), f"{path}: `make golden` rewrites it"


@contextmanager
def refused(*errors: type[Exception]) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect one of these errors inside the block, with the message in the golden file of the test's folder."""
    with pytest.raises(errors) as caught:
        yield caught
    message(str(caught.value))


def message(text: str) -> None:
    """Compare a text with the next one of the running test in the golden file of the test's folder."""
    file, test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0].split("::", 1)
    path = ROOT / file
    folder = path.relative_to(ROOT / "tests").parent
    _messages(_FOLDER / "messages" / f"{'-'.join(folder.parts) or 'top'}.txt").check(path, test, normalised(text))


@cache
def _messages(path: Path) -> _Messages:
    return _Messages(path)


class _Messages:
    """The golden file of a folder of tests: a heading for each test, and below it an item for each of its messages.

    Attributes:
        path: The file.
        sections: The messages of each test, by its file and name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections: dict[tuple[str, str], list[str]] = {}
        for section in re.split(r"(?m)^# ", path.read_text(encoding="utf-8"))[1:] if path.exists() else ():
            heading, _, items = section.partition("\n")
            file, _, test = heading.partition("::")
            texts = re.split(r"(?m)^- ", items.strip("\n"))[1:]
            self.sections[file, test] = [text.strip("\n").replace("\n  ", "\n") for text in texts]
        self._rewritten: set[tuple[str, str]] = set()
        self._used: dict[tuple[str, str], int] = {}

    def check(self, file: Path, test: str, text: str) -> None:
        text = text.strip("\n")
        key = (file.name, test)
        number = self._used.get(key, 0)
        self._used[key] = number + 1
        if _IS_REWRITTEN:
            if "PYTEST_XDIST_WORKER" in os.environ:
                raise pytest.UsageError(
                    "several processes would write one file: use `make golden`, or give -p no:xdist"
                )
            self._rewrite(file, key, text)
        known = self.sections.get(key, [])[number:][:1]
        assert [text] == known, f"{self.path}: `make golden` rewrites it"

    def _rewrite(self, file: Path, key: tuple[str, str], text: str) -> None:
        """Replace the messages of this test, and remove those of tests that its file no longer has."""
        if key not in self._rewritten:
            self._rewritten.add(key)
            self.sections.pop(key, None)
            tests = set(re.findall(r"\bdef (test_\w+)\(", file.read_text(encoding="utf-8")))
            for section in list(self.sections):
                if section[0] == file.name and not tests & set(re.split(r"\W+", section[1])):
                    del self.sections[section]
        self.sections.setdefault(key, []).append(text)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for (known, test), texts in sorted(self.sections.items()):
            items = ("- " + each.replace("\n", "\n  ") + "\n" for each in texts)
            lines.append(f"# {known}::{test}\n{''.join(items)}")
        self.path.write_text("\n".join(lines), encoding="utf-8")
