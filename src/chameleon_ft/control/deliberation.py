"""How decisions come about: from what was prepared or by a search, and with what they take themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from chameleon_ft import recovery
from chameleon_ft.control.decision import Decision, Prepared, Situation
from chameleon_ft.control.failure_history import FailureHistory
from chameleon_ft.control.forethought import Forethought
from chameleon_ft.control.members import Members
from chameleon_ft.control.outage import Outage
from chameleon_ft.control.planner import Planner
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord, Recorder
from chameleon_ft.recovery import FailureModel, rescore

__all__ = ["Deliberation"]


class Deliberation:
    """Has the decisions of a run made, by what it has experienced, and records them.

    Without a forethought, each is made when the loss is there.
    """

    def __init__(
        self,
        *,
        members: Members,
        planner: Planner,
        history: FailureHistory,
        forethought: Forethought | None,
        recorder: Recorder,
    ) -> None:
        self._members = members
        self._planner = planner
        self._history = history
        self._forethought = forethought
        self._recorder = recorder

    # --- what is known -----------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Others are live from now on."""
        self._history.live(len(self._members.live()), time.monotonic())

    def failed(self, worker: int) -> None:
        """A worker was lost."""
        hosts = self._planner.hosts(self._members.hosts())
        left = [hosts.get(each, "") for each in self._members.live()]
        self._history.failed(hosts.get(worker, ""), left, time.monotonic())

    def resumed(self, outage: Outage, records: list[FailureRecord]) -> None:
        """Training has gone on after everyone had stopped."""
        for record in records:
            self._history.resumed(record)
        if outage.weighed_at:
            self._history.decided(
                looked_up=outage.looked_up,
                decide_s=outage.decided_at - outage.stopped_at,
                hand_out_s=outage.decided_at - outage.weighed_at,
            )

    # --- beforehand --------------------------------------------------------------------------------------------------

    def foresee(self, training: Decision, *, step_s: float) -> None:
        """While all is well, have decisions prepared for the next loss: half a step will be lost with it."""
        if self._forethought is not None and set(self._members.live()).issuperset(training.plan.workers):
            self._forethought.expect(lambda: self._outlook(training, self._history.phases(looked_up=True), step_s / 2))

    def forget(self) -> None:
        """What was prepared is of no use any more."""
        if self._forethought is not None:
            self._forethought.drop()

    def on_newcomers(self, training: Decision) -> tuple[recovery.DecisionContext, FailureModel]:
        """What to decide on now whether to stop for newcomers, at the end of a step: everyone trains."""
        return self._outlook(training, replace(self._history.phases(looked_up=True), detect_s=0.0), 0.0)

    def goes_on(self, prepared: Prepared, *, step: int, generation: int) -> None:
        """What was weighed on newcomers is to go on as before: nobody stops."""
        known = self._planner.known(step, prepared.outlook, prepared.rate)
        self._record(generation, prepared.search_s, {"prepared": True, **known, **prepared.decision.to_json()})

    # --- when everyone has stopped -----------------------------------------------------------------------------------

    def decide(
        self,
        situation: Situation,
        in_force: Decision,
        outage: Outage,
        *,
        generation: int,
        since: float | None,
        prepared: Prepared | None,
    ) -> Decision:
        """Decide how to go on; see `control.decision.decide`, also for what it raises.

        What of deciding is over when the stall is predicted is known, a search above all, and predicted as it was.

        Args:
            in_force: whose placement the workers hold.
            generation: what it leads to.
            since: when the last step was committed, or the last decision made.
            prepared: what was weighed on newcomers while training went on.
        """
        phases, repeat_s = outage.stall_so_far(since, self._history.phases(looked_up=False))
        outlook, rate = self._outlook(in_force, phases, repeat_s, situation=situation)
        now = replace(outlook, phases=replace(phases, decide_s=self._decide_s(outage, looked_up=True)))
        found = self._foreseen(now, rate, prepared)
        decision = self._planner.go_on(
            situation,
            outlook if found is None else now,
            rate,
            prepared=found,
            decide_s=partial(self._decide_s, outage, looked_up=False),
        )
        if decision.weighed is None:
            outage.weighed_at = 0.0
        else:
            self._record(generation, time.time() - outage.stopped_at, decision.to_json())
        return decision

    def _decide_s(self, outage: Outage, *, looked_up: bool) -> float:
        """What deciding takes in all, when it is known by now what is chosen."""
        outage.weighed_at, outage.looked_up = time.time(), looked_up
        return max(0.0, outage.weighed_at - outage.stopped_at) + self._history.hand_out_s(looked_up=looked_up)

    def _foreseen(
        self, outlook: recovery.DecisionContext, rate: FailureModel, prepared: Prepared | None
    ) -> recovery.Decision | None:
        """What was decided on just this while training went on, with the figures of now."""
        if prepared is not None and prepared.is_for(outlook):
            # Everybody has stopped for it: if another one is a little better by now, it is done all the same.
            return rescore(prepared.decision, before=prepared.outlook, now=outlook, failures=rate) or prepared.decision
        return None if self._forethought is None else self._forethought.look_up(outlook, rate)

    def _outlook(
        self, in_force: Decision, phases: StallModel, repeat_s: float, *, situation: Situation | None = None
    ) -> tuple[recovery.DecisionContext, FailureModel]:
        outlook = self._planner.outlook(
            in_force,
            self._members.live(),
            self._members.hosts(),
            phases=phases,
            repeat_s=repeat_s,
            unsaved=0 if situation is None else situation.committed - max(situation.checkpoints, default=0),
            held=None if situation is None else situation.held,
        )
        return outlook, self._history.rate

    def _record(self, generation: int, search_s: float, fields: Mapping[str, Any]) -> None:
        trigger = "loss" if fields["lost"] else "join"
        self._recorder.event("decision", generation=generation, trigger=trigger, search_s=search_s, **fields)
