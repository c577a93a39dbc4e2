"""Evaluations: when ranks evaluate, and the results that they report.

Ranks evaluate together after a step whose vote says so. If a worker is lost meanwhile, they begin the next generation
with the evaluation, as long as that has the same state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.commands import Send
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import incidents
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events import kinds
from chameleon_ft.events.records import Evaluation
from chameleon_ft.protocol import messages
from chameleon_ft.recovery.generation import GenerationSpec

# Of the logarithm of a number that can be written out.
_MAX_LOG: Final = 34.0


def evaluate(draft: Draft, connection: int, message: messages.Evaluate) -> None:
    """Have the state evaluated as soon as possible, and answer the command that asked for it."""
    state = draft.state
    if not state.settings.has_evaluation:
        why = "the job has no samples to evaluate: give it `evaluation`, a dataset of held-out samples"
        draft.do(Send(connection, messages.Refused(reason=why)))
        return
    if state.phase is Phase.GATHERING:
        draft.do(Send(connection, messages.Refused(reason="the run has not begun; wait until it trains")))
        return
    draft.do(Send(connection, message.model_copy(update={"committed": state.committed})))
    draft.state = replace(state, evaluations=state.evaluations.requested())
    _request(draft)


def committed(draft: Draft, message: messages.Committed) -> None:
    """Note that ranks evaluate after a committed step, or request it again: a worker may not know the request."""
    state = draft.state
    if message.vote.evaluates:
        draft.state = replace(state, evaluations=state.evaluations.begun(message.step + 1))
        draft.record(kinds.Evaluating(step=message.step))
    else:
        _request(draft)


def _request(draft: Draft) -> None:
    """Send the request to the workers that train, if there is one."""
    state = draft.state
    if state.evaluations.is_wanted and state.active is not None and state.phase is not Phase.STOPPING:
        for worker in state.active.plan.workers:
            repeat_orders(draft, worker)


def repeat_orders(draft: Draft, worker: int) -> None:
    """Repeat the request to a worker that may lack it."""
    if (evaluations := draft.state.evaluations).is_wanted:
        draft.send(worker, messages.BeginEvaluation(request=evaluations.request))


def begin_with(draft: Draft, spec: GenerationSpec) -> GenerationSpec:
    """Return the generation with an evaluation at its beginning, if that of its state was interrupted."""
    evaluations = draft.state.evaluations.continued(spec.first_step)
    draft.state = replace(draft.state, evaluations=evaluations)
    return replace(spec, evaluate=evaluations.pending is not None)


def evaluated(draft: Draft, worker: Worker, message: messages.Evaluated) -> None:
    """Record the result of an evaluation at the first report, and that the workers make progress."""
    incidents.detect(draft, signals.Progressed(draft.at.monotonic_s))
    incidents.detect(draft, signals.OperationsTimed(message.longest_s, in_first_step=not worker.has_stepped))
    state = draft.state
    if message.step + 1 != state.evaluations.pending:
        # Another worker has reported it, or its step is trained again.
        return
    result = evaluation_of(message)
    results = {name: value for name, value in result.results.items() if value is not None}
    evaluations = state.evaluations.ended(results)
    draft.state = replace(state, evaluations=evaluations, outcomes=state.outcomes.evaluated(message.seconds))
    draft.record(result)
    draft.do(commands.NoteEvaluation(message.step + 1, evaluations.of(message.step + 1)))


def evaluation_of(message: messages.Evaluated) -> Evaluation:
    """Return the means of an evaluation."""
    loss = _mean(message.loss, message.terms)
    # The loss of whole numbers, of which a sample has several, is that of a language model.
    are_tokens = math.isclose(message.labels, message.terms) and not math.isclose(message.terms, message.samples)
    result = Evaluation(
        step=message.step,
        loss=loss,
        perplexity=None if loss is None or not are_tokens or loss > _MAX_LOG else math.exp(loss),
        metrics={name: _mean(value, message.terms) for name, value in message.metrics},
        samples=message.samples,
        terms=message.terms,
        seconds=message.seconds,
        generation=message.generation,
    )
    return replace(result, message=result.describe())


def _mean(total: float, terms: float) -> float | None:
    """Return the mean; None if it is no finite number."""
    return total / terms if terms > 0 and math.isfinite(total) else None
