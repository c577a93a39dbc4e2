"""Arrays that the kernels of the search read and fill, as records. Importing this module does not load numba."""

from __future__ import annotations

from typing import Final, NamedTuple

from chameleon_ft.schedule.records import Booleans, Floats, Integers

# Columns of `options`, int64 [options, COLUMNS]; an option says which layers of a stage are recomputed.
FULL: Final = 0
"""Layers recomputed in full, from the first one of the stage on."""
IN_FLIGHT: Final = 1
"""Micro-batches that can be in flight."""
DEFERRED: Final = 2
"""W that can wait when nothing is in flight."""
EACH: Final = 3
"""Bytes of a micro-batch in flight."""
WAITING: Final = 4
"""Bytes of a micro-batch whose W waits."""
FORWARD: Final = 5
"""The most bytes that F needs, those of its own micro-batch included; `BACKWARD` and `WEIGHT` likewise."""
BACKWARD: Final = 6
WEIGHT: Final = 7
FIXED: Final = 8
"""Bytes of state and samples."""
SPARE: Final = 9
"""Bytes that these leave of the worker's memory."""
SELECTIVE: Final = 10
"""Layers recomputed selectively, after those in full."""
COLUMNS: Final = 11


class LayerBytes(NamedTuple):
    """Bytes by layer, int64 [L] each, where nothing else is said.

    Attributes:
        state: parameters, gradients and optimizer state.
        sample: samples kept at hand.
        activation: activations from F to B.
        boundary: what stays of these when the layer is recomputed in full: its input.
        selective: what stays of these when the layer is recomputed selectively; as much if that is not possible.
        recomputable: whether the layer may be recomputed, bool [L].
        output: message to the next layer; zero for the last.
        weight_grad, selective_weight_grad: what I leaves for W; that if the layer is recomputed selectively.
        working, halves_working: needed only while the layer runs F or B, and I or W.
        selective_working: needed by F or B if the layer is recomputed selectively.
        selective_s, forward_s: seconds of recomputation, selective and in full, at speed 1; float64 [L].
    """

    state: Integers
    sample: Integers
    activation: Integers
    boundary: Integers
    selective: Integers
    recomputable: Booleans
    output: Integers
    weight_grad: Integers
    selective_weight_grad: Integers
    working: Integers
    halves_working: Integers
    selective_working: Integers
    selective_s: Floats
    forward_s: Floats


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
        options: int64 [options, COLUMNS].
        recompute_s: seconds of recomputation by option, float64 [options].
        gradient_interval_s: seconds between two gradients that leave a last stage, at least.
        split: whether backward is split in two.
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
    options: Integers
    recompute_s: Floats
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
        micro_batches: of the pipeline.
        limit_s: seconds that the step may take.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        after: bounds on the stages after each stage, float64 [stages, L + 1].
    """

    shape: Integers
    micro_batches: int
    limit_s: float
    sync_s: Floats
    after: Bounds
