"""The first plan of a run, from a file."""

from __future__ import annotations

import json

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Plan


def read_start_plan(config: RunConfig) -> Plan | None:
    """Read the plan that `config` names; None if it names none.

    Raises:
        ConfigError: it cannot be read, or has other micro-batches, or workers that the run lacks.
    """
    if config.plan is None:
        return None
    try:
        text = config.plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {config.plan}: cannot be read: {error}") from None
    inner, size = _inner(text)
    try:
        plan = Plan.from_json(inner)
    except PlanError as error:
        raise ConfigError(f"plan {config.plan}: {error}") from None
    batch = config.batch
    if plan.micro_batches != batch.micro_batches or size not in (None, batch.micro_batch_size):
        of_size, own_size = ("", "") if size is None else (f" of {size}", f" of {batch.micro_batch_size}")
        raise ConfigError(
            f"plan {config.plan}: is of {plan.micro_batches} micro-batches{of_size}, and [batch] says "
            f"{batch.micro_batches}{own_size}; set batch.micro_batches and batch.micro_batch_size as the plan has them"
        )
    if (most := max(plan.workers)) >= config.workers:
        raise ConfigError(
            f"plan {config.plan}: needs worker {most}, and workers = {config.workers}, numbered from 0; "
            f"take at least {most + 1}"
        )
    return plan


def _inner(text: str) -> tuple[str, int | None]:
    """Return the plan, which may be a part of the output of `chameleon plan --json`, and the micro-batch size."""
    try:
        document = json.loads(text)
    except ValueError:
        return text, None
    if not (isinstance(document, dict) and "plan" in document):
        return text, None
    return json.dumps(document["plan"]), document.get("micro_batch_size")
