"""The generations of a run: one is stopped, everyone says what it holds, a decision is made, the next one starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from chameleon_ft.config import Timeouts
from chameleon_ft.control.checkpoints import CheckpointCollector
from chameleon_ft.control.decision import Decision, Prepared, Situation
from chameleon_ft.control.deliberation import Deliberation
from chameleon_ft.control.members import Members
from chameleon_ft.control.messages import Committed, Parked, Pause, PeerFailed, Stop, Switched, Vote
from chameleon_ft.control.newcomers import Newcomers
from chameleon_ft.control.outage import Loss, Outage
from chameleon_ft.control.outcome import Outcomes
from chameleon_ft.control.planner import Planner
from chameleon_ft.control.suspicion import Suspicion
from chameleon_ft.control.watchdog import Watchdog
from chameleon_ft.errors import ControlError, NoHolderError, ProfileError
from chameleon_ft.observe import NoticedBy, Recorder, RunStatus
from chameleon_ft.plan import Plan

__all__ = ["Generations", "Owner", "Phase"]

_UNEXPLAINED_RETRIES = 3  # generations that may fail in a row with nobody to blame


class Phase(Enum):
    """Where a run is."""

    GATHERING = auto()
    """Workers are joining."""
    STOPPING = auto()
    """A generation is over, and not all survivors have parked."""
    REGROUPING = auto()
    """A new generation has its orders, and has not run an operation."""
    TRAINING = auto()
    OVER = auto()


class Owner(Protocol):
    """Who the generations turn to for what is not theirs to do."""

    def end(self, status: RunStatus, reason: str) -> None:
        """End the run."""

    def lose(self, worker: int, noticed_by: NoticedBy, cause: str) -> None:
        """Give up a worker."""


class Generations:
    """Takes a run from one membership to the next.

    `cause_of` says of a loss what is known by now of why it came.

    Attributes:
        phase: where the run is.
        number: of the generation in force; while one is being stopped, that of the next.
        committed: steps known to be applied by some worker, alive or not.
    """

    def __init__(
        self,
        *,
        owner: Owner,
        cause_of: Callable[[Loss], str],
        members: Members,
        planner: Planner,
        recorder: Recorder,
        watchdog: Watchdog,
        checkpoints: CheckpointCollector,
        deliberation: Deliberation,
        newcomers: Newcomers,
        outcomes: Outcomes,
        timeouts: Timeouts,
        store_port: int,
        last: int,
    ) -> None:
        self._owner = owner
        self._cause_of = cause_of
        self._members = members
        self._planner = planner
        self._recorder = recorder
        self._watchdog = watchdog
        self._checkpoints = checkpoints
        self._deliberation = deliberation
        self._newcomers = newcomers
        self._outcomes = outcomes
        self._timeouts = timeouts
        self._store_port = store_port
        self.phase = Phase.GATHERING
        self.number = last
        self.committed = 0
        self._decision: Decision | None = None
        self._in_force: Decision | None = None  # the last whose placement all survivors hold their part of
        self._last_vote: Vote | None = None
        self._parked: dict[int, Parked] = {}
        self._park_by = 0.0  # by the event loop's clock
        self._finished: set[int] = set()
        self._suspicion = Suspicion()
        self._outage = Outage()
        self._at_boundary = False  # whether the generation that is being stopped had paused

    @property
    def nothing_trained(self) -> bool:
        """Whether this run, or a run that goes on, has not done anything yet that ending it would lose."""
        return self.phase is Phase.GATHERING or (self.phase is Phase.REGROUPING and self._last_vote is None)

    @property
    def decision(self) -> Decision | None:
        """What the newest generation was begun with; None before the first."""
        return self._decision

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest generation that has begun; None before the first."""
        return None if self._decision is None else self._decision.plan

    @property
    def reported(self) -> int:
        """The generation whose failed messages matter: while it is being stopped, the one before this."""
        return self.number - 1 if self.phase is Phase.STOPPING else self.number

    def begin(self, decision: Decision) -> None:
        """Start the first generation of this life of the run."""
        self.number += 1
        self._outcomes.begun(time.time())
        self._launch(decision)

    def close(self, status: RunStatus, reason: str) -> None:
        """The run is over: record the losses of workers that had done their part, or before it could go on."""
        self.phase = Phase.OVER
        self._outcomes.end()
        self._deliberation.forget()
        if self._outage.losses:
            self._record_outage(None if status == "failed" else self._decision, stop=reason)

    # --- what workers say --------------------------------------------------------------------------------------------

    def switched(self, message: Switched) -> None:
        """A worker has seen that everyone holds its part of the new placement; the first to say so is recorded."""
        if self.phase is not Phase.REGROUPING or self._outage.switched is not None:
            return
        assert self._decision is not None
        assert self._decision.transition is not None
        self._outage.switched = message
        transfer = self._decision.transition.transfer
        self._planner.transferred(transfer, message.transfer_s, self._members.hosts())
        self._recorder.event(
            "transition",
            generation=self.number,
            workers=len(self._decision.everyone),
            layers=sum(len(each.layers) for each in transfer.messages),
            messages=len(transfer.messages),
            rounds=len(transfer.rounds),
            planned_bytes=transfer.total_bytes,
            moved_bytes=message.moved_bytes,
            transfer_s=message.transfer_s,
        )

    def started(self) -> None:
        """A worker of this generation is about to run its first operation."""
        self._watchdog.progress(asyncio.get_running_loop().time())
        if self.phase is not Phase.REGROUPING:
            return
        self.phase = Phase.TRAINING
        now = time.time()
        self._outcomes.resumed(now)
        outage, newcomers = self._outage, sorted(self._newcomers.workers)
        self._record_outage(self._decision)
        if self._decision is not None and (newcomers or (outage.paused and not outage.losses)):
            self._recorder.join(outage.join_record(self._decision, newcomers, generation=self.number, resumed_at=now))
        self._newcomers.settle()

    def step_committed(self, message: Committed) -> bool:
        """A worker has applied a step; return whether it is the first to say so."""
        if self._decision is None or message.step != self.committed:
            return False
        self.committed = message.step + 1
        self._last_vote = message.vote
        self._suspicion.settle()
        self._watchdog.committed(asyncio.get_running_loop().time(), step_s=message.step_s)
        if self.phase is Phase.TRAINING:  # who trains has switched to it
            self._deliberation.foresee(self._decision, step_s=self._watchdog.step_s)
        return True

    def parked(self, worker: int, message: Parked) -> None:
        """A worker has left its operations and says what it holds."""
        self._parked[worker] = message
        self._proceed()

    def peer_failed(self, worker: int, message: PeerFailed) -> None:
        """A message of a worker has failed."""
        known = self._decision is not None and message.peer in self._decision.everyone
        self._suspicion.report(worker, message.peer if known else None, message.error)
        if self.phase in (Phase.TRAINING, Phase.REGROUPING):
            self._stop()

    def finished(self, worker: int) -> bool:
        """A worker has come to the end of its training; return whether all of them have."""
        self._finished.add(worker)
        return self.plan is not None and self._finished.issuperset(self.plan.workers)

    # --- joins -------------------------------------------------------------------------------------------------------

    def pause_for(self, prepared: Prepared) -> None:
        """Have everyone stop after this step, to do what was weighed on newcomers."""
        self._newcomers.pause(prepared)
        self._members.tell(Pause(generation=self.number))

    def paused(self, message: Committed) -> None:
        """The step is over after which everyone was told to stop."""
        if self.phase is Phase.TRAINING and message.generation == self.number:
            self._outage.paused = self._at_boundary = True
            self._stop()

    # --- losses ------------------------------------------------------------------------------------------------------

    def lost(self, loss: Loss) -> None:
        """Go on without a worker, which is fenced already."""
        self._outage.losses.append(loss)
        self._newcomers.workers.discard(loss.worker)
        self._deliberation.failed(loss.worker)
        if self.phase is Phase.STOPPING:
            self._parked.pop(loss.worker, None)
            self._proceed()
        elif self._decision is not None and self._is_needed(loss.worker, self._decision):
            if loss.worker not in self._finished:
                self._stop()
        elif self.phase is Phase.TRAINING:
            assert self._decision is not None
            spared = replace(
                self._decision,
                first_step=self.committed,
                policy="none",
                action="it was a spare: nothing changes",
                transition=None,
                lost_layers=(),
            )
            self._record_outage(spared)

    def _is_needed(self, worker: int, decision: Decision) -> bool:
        """Whether the generation cannot go on without a worker: one that trains, or takes part in its transition."""
        return worker in (decision.everyone if self.phase is Phase.REGROUPING else decision.plan.workers)

    def overdue(self, now: float) -> Sequence[int]:
        """The workers that should have parked by `now`, by the event loop's clock."""
        if self.phase is not Phase.STOPPING or now <= self._park_by:
            return ()
        return [worker for worker in self._members.live() if worker not in self._parked]

    def _stop(self) -> None:
        """End the generation: everyone leaves what it is doing and says what it holds."""
        self.number += 1
        self.phase = Phase.STOPPING
        self._newcomers.is_pausing = False
        self._outage.ended_at = self._outage.ended_at or time.time()
        self._parked.clear()
        self._finished.clear()
        self._members.tell(Stop(generation=self.number))
        self._park_by = asyncio.get_running_loop().time() + self._timeouts.collective_timeout_s
        self._watchdog.progress(asyncio.get_running_loop().time())
        self._proceed()

    def _proceed(self) -> None:
        """Once all survivors have parked, decide and tell everyone how to go on."""
        if self.phase is not Phase.STOPPING or not self._parked.keys() >= set(self._members.live()):
            return
        assert self._decision is not None
        at_boundary, self._at_boundary = self._at_boundary, False
        if not at_boundary and set(self._members.live()).issuperset(self._decision.everyone) and self._blame():
            return
        self._suspicion.dismiss()
        self._outage.stopped_at = time.time()
        self._outage.switched, self._outage.weighed_at = None, 0.0
        # Where one has switched, everybody has confirmed; where none has, everybody has what it had before.
        if any(parked.placed == self.number - 1 for parked in self._parked.values()):
            self._in_force = self._decision
        assert self._in_force is not None
        situation = Situation(
            plan=self._in_force.plan,
            live=self._members.live(),
            parked=self._parked,
            committed=self.committed,
            last_vote=self._last_vote,
            checkpoints=self._checkpoints.complete(),
            newcomers=frozenset(self._newcomers.workers),
        )
        try:
            if not situation.live:
                raise ControlError("no worker is left")
            decision = self._deliberation.decide(
                situation,
                self._in_force,
                self._outage,
                generation=self.number,
                since=self._outcomes.since,
                prepared=self._newcomers.prepared,
            )
        except (NoHolderError, ControlError, ProfileError) as error:
            self._give_up(error)
            return
        if decision.weighed is not None:
            self._outcomes.decided(
                generation=self.number,
                policy=decision.policy,
                predicted=decision.weighed.chosen,
                repeated_steps=max(0, self.committed - decision.first_step),
                now=time.time(),
            )
        self._launch(decision)

    def _blame(self) -> bool:
        """Messages failed, and yet everyone is there: give up who is in most of them, or try again if nobody is named.

        Returns whether that changed who is live or ended the run, and so has taken care of going on.
        """
        suspicion = self._suspicion
        self._recorder.event("messages_failed", generation=self.number - 1, reports=suspicion.reports)
        if (suspect := suspicion.suspect()) is not None:
            self._owner.lose(suspect, "peer", f"messages with it failed: {suspicion.last_error}")
            return True
        if suspicion.unexplained > _UNEXPLAINED_RETRIES:
            self._owner.end(
                "failed",
                f"messages failed {suspicion.unexplained} times in a row though no worker is lost, at last because "
                f"{suspicion.last_error}; check that the workers reach each other at the addresses of --host",
            )
            return True
        return False

    def _give_up(self, error: NoHolderError | ControlError | ProfileError) -> None:
        reason = str(error)
        if isinstance(error, NoHolderError):
            reason += "; there is no complete checkpoint in this run: set checkpoint.every to have some"
        self._record_outage(None, stop=reason)
        self._owner.end("failed", reason)

    def _launch(self, decision: Decision) -> None:
        """Give every member of the plan its orders for the current generation."""
        planned, told = self._planner.orders(
            decision, self._members.hosts(), generation=self.number, store_port=self._store_port
        )
        self._decision = decision
        if decision.transition is None:
            self._in_force = decision
        self.committed = decision.first_step
        self._finished.clear()
        if decision.load != "keep":
            self._checkpoints.forget(self.number)
        self.phase = Phase.REGROUPING
        self._watchdog.progress(asyncio.get_running_loop().time())
        for worker, order in (told | self._newcomers.let_down(told)).items():
            self._members.send(worker, order)
        self._outage.decided_at = time.time()
        # Whatever nobody waits for comes after that.
        self._deliberation.forget()
        self._deliberation.live()
        # Before any answer is looked at: what is recorded of a generation means nothing without its plan.
        self._recorder.plan(planned, policy=decision.policy)

    def _record_outage(self, decision: Decision | None, *, stop: str = "") -> None:
        now = time.time()
        outage, self._outage = self._outage, Outage()
        was_a_stall = outage.stopped_at > 0  # nobody stops for a spare
        outage = replace(
            outage, stopped_at=outage.stopped_at or now, decided_at=outage.decided_at or outage.stopped_at or now
        )
        records = outage.records(decision, generation=self.number, resumed_at=now, cause_of=self._cause_of, stop=stop)
        for record in records:
            self._recorder.failure(record)
        if decision is not None and was_a_stall:
            self._deliberation.resumed(outage, records)
