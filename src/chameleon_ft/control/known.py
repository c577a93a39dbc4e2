"""What a decision was made from, in JSON values: for whoever asks later why it was made."""

from __future__ import annotations

from chameleon_ft import recovery
from chameleon_ft.control.observations import Corrections
from chameleon_ft.control.words import pipelines_in_words
from chameleon_ft.recovery import FailureModel

__all__ = ["known"]


def known(
    step: int, outlook: recovery.DecisionContext, rate: FailureModel, corrections: Corrections
) -> dict[str, object]:
    """The fields of the event `decision` that say what was known; see docs/files.md."""
    phases = outlook.phases
    return {
        "step": step,
        "lost": list(outlook.lost),
        "live": len(outlook.live),
        "plan": pipelines_in_words(outlook.plan),
        "rate": {
            "failures": rate.failures,
            "incidents": rate.incidents,
            "together": {str(size): count for size, count in sorted(rate.together.items())},
            "bursts": rate.bursts,
            "worker_s": rate.worker_s,
            "prior_failures": rate.prior_failures,
            "worker_mtbf_s": rate.worker_mtbf_s,
            "host_share": rate.host_share if len(set(outlook.costs.cluster.hosts.values())) > 1 else None,
        },
        "stall": {
            "repeat_s": outlook.repeat_s,
            "detect_s": phases.detect_s,
            "stop_s": phases.stop_s,
            "decide_s": phases.decide_s,
            "regroup_s": phases.regroup_s,
            "restart_s": outlook.return_s,
        },
        "corrections": corrections.to_json(),
    }
