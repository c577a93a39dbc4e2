"""Arrays that the kernels of the search read and fill, as records. Importing this module does not load numba."""

from __future__ import annotations

from typing import NamedTuple

from chameleon_ft.schedule.records import Floats, Integers, Records


class Tables(NamedTuple):
    """Stages of a model of L layers on each of C classes of workers.

    Attributes:
        forward_s, backward_s, weight_s: seconds of F, of B or I, and of W (zero with fused backward), without
            recomputation; float64 [C, L + 1, L + 1], by class, start and stop.
        message_s: seconds of the message over the boundary before a layer, float64 [L + 1].
        forward_before_s, backward_before_s: least seconds of F, and of B or I, of all layers before a layer; float64
            [L + 1].
        first: row of the stage's first option in `options`, int64 [C, L + 1, L + 2]; the options of (start, stop) end
            where those of (start, stop + 1) begin.
        options: ways to recompute each stage, `OPTION` [options].
        gradient_interval_s: seconds between two gradients that leave a last stage, at least.
        split: backward is split in two.
        in_flight_share: a stage needs room for this share of the micro-batches that 1F1B has in flight on it, or for as
            many as fit if these are fewer. With 0 the times are bounds, otherwise estimates.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    message_s: Floats
    forward_before_s: Floats
    backward_before_s: Floats
    first: Integers
    options: Records
    gradient_interval_s: float
    split: bool
    in_flight_share: float


class Bounds(NamedTuple):
    """Lower bounds in seconds, float64 [n, L + 1] each, by first layer; n counts stages, see where it is used.

    Attributes:
        first_s: until the gradient of a single micro-batch has gone out again.
        returned_s: until the last gradient of all micro-batches has gone out again.
        ended_s: until all workers have ended and have reduced their gradients.
    """

    first_s: Floats
    returned_s: Floats
    ended_s: Floats


class Pipeline(NamedTuple):
    """A pipeline to be cut.

    Attributes:
        shape: class of each worker, int64 [stages].
        micro_batches: micro-batches of the pipeline.
        limit_s: seconds that the step may take.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        after: bounds on the stages after each stage, float64 [stages, L + 1].
    """

    shape: Integers
    micro_batches: int
    limit_s: float
    sync_s: Floats
    after: Bounds
