"""The decisions that the state machine asks for: how to start, and how to continue after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.control import events
from chameleon_ft.control.background_tasks import BackgroundTasks
from chameleon_ft.control.decisions.decisions import Decisions
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.run_checkpoints import Examined, RunCheckpoints
from chameleon_ft.control.state.checkpoints import describe_unreadable
from chameleon_ft.control.state.state import State
from chameleon_ft.errors import ControlError, NoHolderError, ProfileError
from chameleon_ft.observe import Recorder

_NO_CHECKPOINT: Final = "; there is no complete checkpoint in this run"


class DecisionTasks:
    """Carries out `Task.DECIDE` and `Task.CONSIDER_SCALE_UP`, at once or in the background.

    Args:
        resume: whether to begin with a checkpoint.
        changes: how the job differs from the one that it was written by.
        now: returns the time.
        handle: takes an answer that comes later.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        planner: Planner,
        decisions: Decisions,
        checkpoints: RunCheckpoints,
        recorder: Recorder,
        resume: bool,
        changes: Sequence[str],
        now: Callable[[], events.Moment],
        handle: Callable[[events.Event], None],
        tasks: BackgroundTasks,
    ) -> None:
        self._config = config
        self._planner = planner
        self._decisions = decisions
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._resume = resume
        self._changes = changes
        self._now = now
        self._handle = handle
        self._tasks = tasks

    def decide(self, state: State, damages: Mapping[int, str] | None = None) -> events.Event | None:
        """Decide on a plan, and if it begins with a checkpoint, on one without visible damage.

        Returns None if the disk does not tell at once whether a checkpoint is damaged; the answer is handled then.

        Args:
            damages: checkpoints that have been found damaged meanwhile, and how.
        """
        damages = damages or {}
        unreadable = {**state.checkpoints.unreadable, **damages}
        complete = self._checkpoints.steps()
        answer = self._decided(state, [step for step in complete if step not in unreadable], unreadable)
        if not isinstance(answer, events.Decided) or not isinstance(step := answer.plan.load, int):
            return answer

        def examined(found: Examined) -> events.Event | None:
            if found.damage is None:
                if state.active is None:
                    self._report_resumed(step, found)
                return answer
            if found.is_damaged:
                self._checkpoints.mark_damaged(step)
                message = describe_unreadable(step, found.damage)
            else:  # without an older one, it may be read in another start
                message = f"that of step {step} cannot be read here and is not used: {found.damage}"
            self._recorder.event("checkpoint_unreadable", step=step, error=found.damage, message=message)
            return self.decide(state, {**damages, step: found.damage})

        examining = self._checkpoints.examine(step)
        if examining.done():
            return examined(examining.result())
        self._tasks.start(self._handle_later(examining, examined))
        return None

    async def _handle_later(
        self, examining: Future[Examined], examined: Callable[[Examined], events.Event | None]
    ) -> None:
        if (answer := examined(await asyncio.wrap_future(examining))) is not None:
            self._handle(answer)

    def _decided(self, state: State, checkpoints: list[int], unreadable: Mapping[int, str]) -> events.Event:
        question = state.question
        damages = "".join(f"; {describe_unreadable(step, why)}" for step, why in sorted(unreadable.items()))
        if state.holds_nothing:
            if self._resume and damages and not checkpoints:
                reason = f"there is no checkpoint that can be read{damages}"
                return events.DecisionFailed(at=self._now(), question=question, reason=reason)
            checkpoint = checkpoints[-1] if checkpoints and self._resume else None
            members = state.members
            if optimizer := self._planner.undivided:
                message = (
                    f"every holder of a layer keeps all of it: {optimizer} is not known to update each element of a "
                    "parameter by itself; a job says that its optimizer does by Job(elementwise=True)"
                )
                self._recorder.event("optimizer_undivided", optimizer=optimizer, message=message)
            for hint in self._planner.hints:
                self._recorder.event("hint", message=hint)
            plan = self._planner.start(
                members.live(), members.hosts(), checkpoint=checkpoint, host_memory=members.host_memory()
            )
            return events.Decided(at=self._now(), question=question, plan=plan)
        try:
            plan, chosen_at = self._decisions.decide(state, checkpoints)
        except NoHolderError as error:
            remedy = "" if self._config.checkpoint.every else ": set checkpoint.every to write some"
            reason = f"{error}{damages or _NO_CHECKPOINT + remedy}"
            return events.DecisionFailed(at=self._now(), question=question, reason=reason)
        except (ControlError, ProfileError) as error:
            return events.DecisionFailed(at=self._now(), question=question, reason=f"{error}{damages}")
        return events.Decided(at=self._now(), question=question, plan=plan, chosen_at=chosen_at)

    def _report_resumed(self, step: int, found: Examined) -> None:
        """Record which checkpoints a resumed run does not use, and in what its job differs."""
        for newer in found.incomplete:
            if newer > step:
                message = f"that of step {newer} is not complete and not used"
                self._recorder.event("checkpoint_incomplete", step=newer, message=message)
        if self._changes:
            message = f"training continues from step {step} with another job: {'; '.join(self._changes)}"
            self._recorder.event("job_changed", step=step, changes=self._changes, message=message)

    async def consider(self, state: State) -> None:
        """Decide while training continues, and handle the answer."""
        question = state.scale_up.question
        try:
            found = await self._decisions.consider(state)
        except Exception as error:  # noqa: BLE001 - the executor's process may be gone; training continues without
            reason = f"{type(error).__name__}: {error}"
            answer = events.Considered(at=self._now(), question=question, error=reason)
        else:
            answer = events.Considered(
                at=self._now(), question=question, staying=found.context.live, plans=found.plans, reason=found.reason
            )
        self._handle(answer)
