"""Decisions: calibrated costs, the choice of a recovery plan, and the orders that carry it out."""
