"""Rival planners with their policies, and emulated devices and links: all that only comparisons need.

`chameleon_ft.registry` names what others load from here; no other module imports this package. Published planners share
with our search only what places, schedules and replays plans.
"""
