"""Workers with a wrong state: known ones are given up; otherwise all return to a checkpoint, or the run ends."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.handlers import bad_steps, incidents
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.checkpoints import Disagreement
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events import kinds
from chameleon_ft.protocol import messages
from chameleon_ft.quantities import in_ranges


def state_differs(draft: Draft, message: messages.StateDiffers) -> None:
    """Act on the first report that holders of layers have different states; those of other workers say the same.

    The report may come after the generation has been stopped, because other workers have found messages to fail.
    """
    state = draft.state
    is_known = message.generation != state.active_generation or state.health.disagreement is not None
    if is_known or state.phase not in (Phase.TRAINING, Phase.REGROUPING, Phase.STOPPING):
        return
    found = state.health.differs(message.step, {layer: dict(each) for layer, each in message.checksums})
    # A checkpoint may have the wrong state from the moment at which the holders last agreed.
    draft.do(commands.DistrustCheckpoints(after=state.health.agreed))
    draft.state = replace(draft.state, snapshots=state.snapshots.distrusted(state.health.agreed))
    draft.state = replace(draft.state, health=replace(state.health, disagreement=found))
    ending = _why_it_ends(draft, found) if found.undecided else None
    action = "all return to a snapshot or checkpoint from before" if ending is None else "the run ends"
    draft.record(
        kinds.StateDiffers(
            step=found.step,
            agreed=state.health.agreed,
            odd={worker: tuple(layers) for worker, layers in found.odd.items()},
            undecided={layer: tuple(workers) for layer, workers in found.undecided.items()},
            message=f"{found}; {action}" if found.undecided else None,
        )
    )
    if ending is not None:
        incidents.end(draft, "failed", ending)
        return
    if found.undecided:
        draft.state = replace(draft.state, health=replace(draft.state.health, doubted=found.doubted))
    for worker, layers in found.odd.items():
        name = "layer" if len(layers) == 1 else "layers"
        cause = f"its state of {name} {in_ranges(layers)} after {found.step} updates differs from that of its peers"
        incidents.lose(draft, worker, "checksum", cause)
    if draft.state.phase in (Phase.TRAINING, Phase.REGROUPING):
        incidents.stop(draft)
    if draft.state.phase is not Phase.OVER:
        # Parts of checkpoints that workers are still writing do not count.
        checkpoints = draft.state.checkpoints.without_parts_before(draft.state.generation)
        draft.state = replace(draft.state, checkpoints=replace(checkpoints, is_reread=bool(found.undecided)))


def sample_unread(draft: Draft, worker: int, message: messages.SampleUnread) -> None:
    """Have all workers leave out a sample that one could not read."""
    health, sample = draft.state.health, (message.step, message.epoch, message.sample)
    if sample in health.left_out:
        return
    draft.state = replace(draft.state, health=replace(health, left_out=health.left_out | {sample}))
    draft.record(
        kinds.SampleLeftOut(
            step=message.step,
            epoch=message.epoch,
            sample=message.sample,
            worker=worker,
            host=draft.state.hosts().get(worker, ""),
            error=message.error,
            is_replaced=message.is_replaced,
            message=f"sample {message.sample} is left out of step {message.step}: {message.error}",
        )
    )


def loader_ended(draft: Draft, worker: int, message: messages.LoaderEnded) -> None:
    """Record that a process that reads samples has ended, and that the worker has replaced it."""
    host = draft.state.hosts().get(worker, "")
    where = f"worker {worker}{f' on {host}' if host else ''}"
    doing = f" while {message.doing}" if message.doing else ""
    text = f"{message.loader} of {where} has ended{doing}; another one takes its place"
    draft.record(kinds.LoaderEnded(worker=worker, host=host, loader=message.loader, doing=message.doing, message=text))


def bad_step(draft: Draft, worker: int, message: messages.BadStep) -> None:
    """Collect the workers' reports of a bad step, and act once all have reported: until then, some compute it.

    Reports of the next step may come in between, because each worker has a connection of its own.
    """
    state = draft.state
    # Some workers may have switched to the next generation after the step already.
    if message.generation not in (state.active_generation, state.switched_from) or state.active is None:
        return
    health = state.health.reported(worker, message, state.active.plan.workers)
    draft.state = replace(state, health=health)
    reports = health.reports_of(message.step)
    if not reports.keys() >= health.reporting[message.step].intersection(state.members.live()):
        return
    action = state.settings.health.on_bad_step if message.is_bad_again else "applied"
    bad_steps.record(draft, message.step)
    if action == "stop":
        ending = bad_steps.describe(reports, action=action)
        remedy = "to leave its samples out, resume with --health.on-bad-step skip"
        draft.state = replace(draft.state, health=replace(draft.state.health, ending=f"{ending}; {remedy}"))
    elif action == "rollback":
        bad_steps.skipped(draft, message.step)
        draft.state = replace(draft.state, checkpoints=replace(draft.state.checkpoints, is_reread=True))
        incidents.stop(draft)


def _why_it_ends(draft: Draft, found: Disagreement) -> str | None:
    """Return why the run ends; None if all workers are to return to a checkpoint."""
    health, settings = draft.state.health, draft.state.settings.health
    if settings.on_disagreement == "stop":
        remedy = "the run ends (health.on_disagreement = stop); --resume continues from a checkpoint from before"
        return f"{found}: {remedy}"
    if again := sorted(found.doubted & health.doubted):
        return f"{found}, again after a return to a checkpoint: {_REMEDY.format(min(again))}"
    return None


_REMEDY = (
    "one of them has a fault, or their processors compute differently; resume without worker {}, or set "
    "health.check_every to 0 if that is to be allowed"
)
