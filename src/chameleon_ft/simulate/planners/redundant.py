"""Every stage has its successor's state and computes its forward once more (Bamboo, Thorpe et al., NSDI 2023).

Only simulated, by class: no run has it.
"""

from __future__ import annotations

from chameleon_ft.recovery import Policy

__all__ = ["POLICY"]

POLICY = Policy(kinds={"repartition": "redundant"}, starts="equal")
