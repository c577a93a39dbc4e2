"""Imported by the fork server, so that a rank has everything loaded the moment it is forked.

The optimizer needs torch._dynamo. Nothing here may start a thread: a fork copies only the thread that forks.
"""

from __future__ import annotations

import chameleon_ft.models.llama_job
import chameleon_ft.runtime.communicators.gloo
import chameleon_ft.runtime.inspection
import chameleon_ft.runtime.rank
import chameleon_ft.runtime.store  # noqa: F401
