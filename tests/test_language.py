"""The words of the code: names that were given up stay away, and prose keeps to a few rules (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import chameleon_ft

ROOT = Path(chameleon_ft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

OLD_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    Crew Deliberation Expect Fleet Forethought Looks Outage Outlook Parked RoomMade Rooms Situation StepSums
    Told Way _course _handed_in _in_roles _kinds _min_mix _looks banned collective_s crew deliberation
    disk_messages disk_waits drafted end_now equivalence everyone experience fleet forethought generations goes_on
    handed_in heartbeat_s host_share in_roles in_words indispensable kept_hops last_holders last_hosts lean_draft
    lean_kernel mend message_parts nobody not_weighed observations outlook parked part_of_kernel precompute
    prepare_decisions refusals restart_s room_messages somebody supervise supervisor suspicion ways weigh weighed
    """,
    )
)
PEOPLE = re.compile(r"\b(nobody|everybody|everyone|somebody|whom)\b", re.IGNORECASE)
OLD_PHRASES = re.compile(r"\bbeside training\b", re.IGNORECASE)
OPENINGS = re.compile(r"(The same|What)\b")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def identifiers(tree: ast.Module) -> set[str]:
    """Every name that a file gives or uses."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
    return {part for name in found for part in name.split(".")}


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string, docstrings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_names_that_were_given_up_stay_away() -> None:
    old = {
        str(path.relative_to(ROOT)): sorted(found)
        for path, tree in trees()
        if (found := (identifiers(tree) | {path.stem}) & OLD_NAMES)
    }
    assert not old


def test_processes_are_not_people_and_docstrings_say_what_a_thing_is_or_does() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path, tree in trees()
        for line, text in texts(tree)
        if PEOPLE.search(text) or OLD_PHRASES.search(text) or OPENINGS.match(text)
    ]
    assert not odd


def test_comments_speak_of_processes_as_such() -> None:
    odd = [
        f"{path.relative_to(ROOT)}: {comment}"
        for path in FILES
        for comment in re.findall(r"#.*", path.read_text(encoding="utf-8"))
        if PEOPLE.search(comment) or OPENINGS.match(comment.lstrip("# "))
    ]
    assert not odd
