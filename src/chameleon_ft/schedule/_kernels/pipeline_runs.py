"""The state of the event loop of `pipelines`: how far the stages of a pipeline have come."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule._records import Floats, Integers, Records

RULES: Final = np.dtype([("forward_first", np.bool_), ("patience", np.float64)], align=True)
"""Those of `Rules` that are the same for all workers."""

STAGE: Final = np.dtype(
    [
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("weight_s", np.float64),
        ("down_s", np.float64),
        ("up_s", np.float64),
        ("room", np.int64),
        ("kept", np.int64),
        ("forwards", np.int64),
        ("backwards", np.int64),
        ("weights", np.int64),
        ("sending", np.int64),
        ("denied", np.bool_),
        ("awaits", np.bool_),
        ("free", np.float64),
        ("replayed_s", np.float64),
        ("left_s", np.float64),
        ("limit_s", np.float64),
    ],
    align=True,
)
"""A stage, and how far its worker has come.

forward_s, backward_s, weight_s: of F, of B or I, and of W. down_s, up_s: of messages to the next stage and to the one
before. room, kept: how much more it may put in flight, and keep. forwards, backwards, weights: how many have been run.
sending: where it sent to last. denied: whether it had something ready, but would have closed a circle of workers that
hold each other back. awaits: whether it had something for the next stage, but was not to run ahead of it. free: when it
is. replayed_s: the same in the replay. left_s: of operations that are still to be run. limit_s: when they have to have
ended in the replay for the run to be of any use.
"""

STATE: Final = np.dtype(
    [
        ("micro_batches", np.int64),
        ("per_stage", np.int64),
        ("limit_s", np.float64),
        ("split", np.bool_),
        ("forward_first", np.bool_),
        ("patience", np.float64),
        ("gradients_only", np.bool_),
        ("may_end", np.bool_),
        ("slack_s", np.float64),
        ("latest_s", np.float64),
        ("denied", np.int64),
        ("strained", np.bool_),
        ("beyond_limits", np.bool_),
    ],
    align=True,
)
"""What there is only one of: micro-batches, operations of a stage, rules, when the last of what has been started ends
or arrives, how many workers are denied something, and results.

limit_s: as that of stages, for all of them. may_end: whether the run may end early where it is of no use.
"""


class Run(NamedTuple):
    """One run, and room for it. Arrays by stage and micro-batch have those of a stage one after the other.

    Attributes:
        stages: `STAGE`.
        forward_at, backward_at: when the tensor that an F, and a B or I, needs is there.
        ends_s: by code, in the replay.
        codes: what each worker runs, one worker after the other.
        wake_s: when each worker is to look what it can run; infinite where it waits for others.
        state: one `STATE`.
    """

    stages: Records
    forward_at: Floats
    backward_at: Floats
    ends_s: Floats
    codes: Integers
    wake_s: Floats
    state: Records
