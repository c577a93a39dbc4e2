"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch is imported: tests share the machine's cores with each other and with the processes they start, and
# idle threads that spin for work slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, and nothing about the code. What is drawn is the same in
# every run, so that a change passes or fails for what it does; `make explore` draws anew.
settings.register_profile(
    "chameleon", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chameleon")
