"""Deciding how to continue: what is known in numbers, the plan that is chosen, and the orders that carry it out."""
