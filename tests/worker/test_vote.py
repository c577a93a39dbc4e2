"""Votes over a tree of ranks: threads take the part of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, TreeVote
from tests.worker.switchboard import Line, Switchboard

groups = st.sets(st.integers(0, 200), min_size=2, max_size=80).map(lambda workers: tuple(sorted(workers)))


class Counting(Line):
    sent: ClassVar[list[int]] = []

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        Counting.sent.append(peer)
        return super().send(tensor, peer=peer, tag=tag)


def run(group: tuple[int, ...], act: Callable[[int, Line], None], board: Switchboard) -> None:
    threads = [threading.Thread(target=act, args=(worker, Counting(worker, board))) for worker in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@given(groups, st.integers(1, 3))
def test_all_ranks_have_the_sum_of_all_ballots(group: tuple[int, ...], votes: int) -> None:
    totals: dict[int, list[list[float]]] = {worker: [] for worker in group}
    Counting.sent.clear()

    def act(worker: int, line: Line) -> None:
        for vote in range(votes):
            ballot = torch.tensor([worker, 0.1 * worker, vote, 1.0], dtype=torch.float64)
            TreeVote(ballot, worker=worker, group=group, communicators=line).wait()
            totals[worker].append(ballot.tolist())

    run(group, act, Switchboard())
    for vote, (numbers, tenths, counted, voters) in enumerate(totals[group[0]]):
        assert (numbers, counted, voters) == (sum(group), vote * len(group), len(group))
        assert tenths == pytest.approx(0.1 * sum(group), rel=1e-12)
    assert all(total == totals[group[0]] for total in totals.values()), "bit for bit"
    assert len(Counting.sent) == 2 * votes * (len(group) - 1)


@given(groups, st.randoms(use_true_random=False))
def test_no_rank_has_a_total_without_all_ballots(group: tuple[int, ...], random: Random) -> None:
    absent, board = random.choice(group), Switchboard()
    ended: list[str] = []

    def act(worker: int, line: Line) -> None:
        if worker == absent:
            return
        try:
            TreeVote(torch.ones(1), worker=worker, group=group, communicators=line).wait()
        except CommunicationError:
            ended.append("interrupted")
        else:
            ended.append("counted")

    voting = threading.Thread(target=run, args=(group, act, board))
    voting.start()
    voting.join(0.02)
    board.cut.set()
    voting.join(60)
    assert ended == ["interrupted"] * (len(group) - 1)
