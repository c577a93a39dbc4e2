"""The lease in the run directory: processes that are killed or stopped at any moment, and calls that hang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from chameleon_ft.coordinator.lease.files import FileLease
from chameleon_ft.errors import LeaseError
from tests.coordinator.lease.places import claim_of, without_renewals

_CONTENDER = """
import asyncio, sys
from pathlib import Path
from tests.coordinator.lease.places import claim_of
from chameleon_ft.coordinator.lease.files import FileLease

async def contend(directory, contender):
    lease = FileLease(Path(directory))
    for line in sys.stdin:
        term = int(line)
        print(term if await lease.claim(claim_of(term, int(contender))) else 0, flush=True)

asyncio.run(contend(*sys.argv[1:]))
"""


def test_of_processes_at_the_same_time_exactly_one_wins_each_term(tmp_path: Path) -> None:
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTENDER, str(tmp_path), str(contender)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for contender in range(3)
    ]
    terms = "".join(f"{term}\n" for term in range(1, 41))
    try:
        answers: list[list[str]] = [[] for _ in contenders]

        def ask(number: int) -> None:
            answers[number] = contenders[number].communicate(terms, timeout=60)[0].split()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(contenders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        for contender in contenders:
            contender.kill()
            contender.wait(10)
    # Each process asks for all terms in turn, but one that is ahead makes others lose all that it has passed.
    assert [len(answer) for answer in answers] == [40, 40, 40]
    won = [answer for each in answers for answer in each if answer != "0"]
    assert len(won) == len(set(won))
    assert "40" in won


def test_a_claim_appears_with_its_whole_content_and_drafts_do_not_count(tmp_path: Path) -> None:
    async def scene() -> None:
        lease = FileLease(tmp_path)
        (tmp_path / ".000009.json.0123").write_text('{"ter', encoding="utf-8")  # its process was killed
        assert await lease.claim(claim_of(1))
        assert sorted(path.name for path in tmp_path.iterdir()) == [".000009.json.0123", "000001.json"]

    asyncio.run(scene())


def test_old_terms_stay_as_they_were(tmp_path: Path) -> None:
    async def scene() -> list[bytes]:
        contents = []
        for term in range(1, 4):
            assert await FileLease(tmp_path).claim(claim_of(term, contender=term))
            contents.append((tmp_path / f"{term:06}.json").read_bytes())
        return contents

    contents = asyncio.run(scene())
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == contents


def test_a_renewal_needs_no_space_and_a_claim_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        lease = FileLease(tmp_path)
        assert await lease.claim(claim_of(1))
        monkeypatch.setattr(os, "fsync", _full)
        assert await lease.renew(claim_of(1))
        with pytest.raises(LeaseError, match="No space left"):
            await lease.claim(claim_of(2))
        assert without_renewals(await lease.newest()) == claim_of(1)

    asyncio.run(scene())
    assert [path.name for path in tmp_path.iterdir()] == ["000001.json"]


def test_a_renewal_counts_up_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> list[int]:
        lease = FileLease(tmp_path)
        assert await lease.claim(claim_of(1))
        seen = []
        for now in (2e9, 1e9, 1e9, 0.0):
            monkeypatch.setattr("time.time", lambda now=now: now)
            assert await lease.renew(claim_of(1))
            newest = await lease.newest()
            assert newest is not None
            seen.append(newest.renewals)
        return seen

    seen = asyncio.run(scene())
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("content", [b'{"term": 2', b"\xff\x00"])
def test_a_claim_that_is_damaged_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "000002.json").write_bytes(content)
    with pytest.raises(LeaseError, match=r"000002\.json.*remove the file"):
        asyncio.run(FileLease(tmp_path).newest())


def test_a_file_system_that_hangs_delays_only_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(60))

    async def scene() -> None:
        claim = asyncio.create_task(FileLease(tmp_path).claim(claim_of(1)))
        # The loop goes on, and so do calls that need not wait.
        assert await FileLease(tmp_path).newest() is None
        assert not claim.done()
        answers.set()
        assert await claim

    asyncio.run(scene())


def test_a_process_ends_although_a_call_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "000001.json")  # to open it for reading hangs
    code = (
        "import asyncio, sys; from pathlib import Path; from chameleon_ft.coordinator.lease.files import FileLease\n"
        "async def scene():\n"
        "    newest = asyncio.create_task(FileLease(Path(sys.argv[1])).newest())\n"
        "    await asyncio.sleep(0)\n"
        "    newest.cancel()\n"
        "asyncio.run(scene())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")
