"""The plan that a run was told to start with."""

from __future__ import annotations

import json

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Plan

__all__ = ["read_start_plan"]


def read_start_plan(config: RunConfig) -> Plan | None:
    """Read the plan that `config` names; None where it names none.

    Raises:
        ConfigError: it cannot be read, or is of another number of micro-batches, or of workers that the run lacks.
    """
    if config.plan is None:
        return None
    try:
        text = config.plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {config.plan}: cannot be read: {error}") from None
    try:
        plan = Plan.from_json(_inner(text))
    except PlanError as error:
        raise ConfigError(f"plan {config.plan}: {error}") from None
    if plan.micro_batches != config.batch.micro_batches:
        raise ConfigError(
            f"plan {config.plan}: is of {plan.micro_batches} micro-batches, and batch.micro_batches is "
            f"{config.batch.micro_batches}; make them equal"
        )
    if (most := max(plan.workers)) >= config.workers:
        raise ConfigError(
            f"plan {config.plan}: needs worker {most}, and workers = {config.workers}, numbered from 0; "
            f"take at least {most + 1}"
        )
    return plan


def _inner(text: str) -> str:
    """The plan itself, also where it is one of the things that `chameleon plan --json` says."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    return json.dumps(document["plan"]) if isinstance(document, dict) and "plan" in document else text
