# ruff: noqa: F401
"""Imported by the fork server, so that a rank has everything loaded the moment it is forked.

Nothing here may start a thread: a fork copies only the thread that forks.
"""

from __future__ import annotations

import torch._dynamo
import torch.distributed.checkpoint
import torch.utils.serialization.config

import chameleon_ft.models.llama
import chameleon_ft.worker.communicators.gloo
import chameleon_ft.worker.inspection
import chameleon_ft.worker.rank
