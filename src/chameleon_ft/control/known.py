"""What a decision was made from, in JSON values: for whoever asks later why it was made."""

from __future__ import annotations

from collections import Counter

from chameleon_ft import recovery
from chameleon_ft.control.observations import Corrections
from chameleon_ft.plan import Plan
from chameleon_ft.plan.detours import disjoint_pipelines
from chameleon_ft.recovery import FailureRate

__all__ = ["known"]


def known(step: int, outlook: recovery.Situation, rate: FailureRate, corrections: Corrections) -> dict[str, object]:
    """The fields of the event `decision` that say what was known; see docs/files.md."""
    phases = outlook.phases
    return {
        "step": step,
        "lost": list(outlook.lost),
        "live": len(outlook.live),
        "plan": _in_words(outlook.plan),
        "rate": {
            "failures": rate.failures,
            "worker_s": rate.worker_s,
            "prior_failures": rate.prior_failures,
            "worker_mtbf_s": rate.worker_mtbf_s,
        },
        "stall": {
            "repeat_s": outlook.repeat_s,
            "detect_s": phases.detect_s,
            "stop_s": phases.stop_s,
            "decide_s": phases.decide_s,
            "regroup_s": phases.regroup_s,
        },
        "corrections": corrections.to_json(),
    }


def _in_words(plan: Plan) -> str:
    """Write "2 pipelines of 4 stages, 1 of 3; 2 detours"; a detour is a way that is no pipeline of its own."""
    pipelines = disjoint_pipelines(plan)
    depths = sorted(Counter(map(len, pipelines)).items(), key=lambda item: (-item[1], -item[0]))
    words = [
        f"{count} {_noun('pipeline', count)} of {depth} {_noun('stage', depth)}"
        if place == 0
        else f"{count} of {depth}"
        for place, (depth, count) in enumerate(depths)
    ]
    more = len({route.hops for route in plan.routes}) - len(pipelines)
    return ", ".join(words) + (f"; {more} {_noun('detour', more)}" if more else "")


def _noun(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
