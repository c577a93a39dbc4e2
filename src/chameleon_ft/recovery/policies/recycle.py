"""ReCycle (Gandhi et al., SOSP 2024, arXiv 2405.14009): detours until a worker is back.

As published: pipelines run 1F1B with fused backward as long as no worker is lost (start it with such a plan);
micro-batches of a lost worker go to its data-parallel peers, whose bubbles they fill (Adaptive Pipelining); the halves
of the backward become operations of their own so that more of them fit there (Decoupled BackProp), with up to one and
two pipeline depths of micro-batches in flight on each worker where memory holds them. A worker that is back takes the
place of a lost one. Its planner finds schedules by mixed-integer programming; here they are by `best_program`. The
Staggered Optimizer, by which a stage starts its next step while others end theirs, is left out: a step ends for all
workers at once. No source code of ReCycle is known to us, nor whether it recomputes activations: workers do so if they
do in the plan.
"""

from __future__ import annotations

from chameleon_ft.recovery.policy import Policy

__all__ = ["POLICY"]

POLICY = Policy(
    propose=lambda proposer: [
        *proposer.reroute("recycle"),
        *proposer.reroute_decoupled("recycle-decoupled"),
        *proposer.rejoin("recycle-rejoin"),
    ],
    starts="several",
)
