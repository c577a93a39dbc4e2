"""Peak memory of stages and the micro-batches that fit, by number of recomputed layers and kind of recomputation.

`chameleon_ft.cost.memory` describes the memory model; here each worker has one stage.
"""

from __future__ import annotations

from typing import Final

from chameleon_ft.schedule.jit import no_refcount_inline, no_refcount_kernel
from chameleon_ft.schedule.records import Floats, Integers
from chameleon_ft.search._kernels.records import (
    BACKWARD,
    COLUMNS,
    DEFERRED,
    EACH,
    FIXED,
    FORWARD,
    FULL,
    IN_FLIGHT,
    SELECTIVE,
    SPARE,
    WAITING,
    WEIGHT,
    LayerBytes,
)

# More micro-batches than any step has.
_UNLIMITED: Final = 2**40


@no_refcount_kernel
def fill_options(
    layers: LayerBytes, capacity: int, split: bool, most: int, first: Integers, options: Integers, recompute_s: Floats
) -> int:
    """Fill in the recomputation options of every stage on a worker with `capacity` bytes; return their number.

    Some layers from the first one on are recomputed selectively; or in full, and all others selectively or not at all.
    Options are sorted by their seconds, and kept if at least one micro-batch fits and more micro-batches can be in
    flight, or more W can wait, than with all options before.

    Args:
        layers: of the model.
        capacity: bytes of the worker.
        split: whether backward is split in two.
        most: number of micro-batches in flight beyond which more room is useless.
        first: as in `Tables`, int64 [L + 1, L + 2], filled in.
        options: int64 [options, COLUMNS], filled in; there must be room for 3 (stop - start) + 1 options of each stage.
        recompute_s: seconds of recomputation at speed 1 by option, float64 [options], filled in.
    """
    num_layers = len(layers.state)
    found = 0
    for start in range(num_layers + 1):
        for stop in range(num_layers + 2):
            first[start, stop] = found
            if start < stop <= num_layers:
                end = _fill_stage(layers, capacity, split, most, start, stop, found, options, recompute_s)
                found = _keep_best(most, found, end, options, recompute_s)
        first[start, num_layers + 1] = found
    return found


@no_refcount_inline
def _fill_stage(
    layers: LayerBytes,
    capacity: int,
    split: bool,
    most: int,
    start: int,
    stop: int,
    begin: int,
    options: Integers,
    recompute_s: Floats,
) -> int:
    """Fill in the options of a stage that fit a micro-batch, sorted by seconds, from row `begin` on; return their end.

    Arguments are as for `fill_options`.
    """
    end = begin
    # Seconds with layers recomputed selectively or, up to `full`, in full; and with only the latter.
    selective_s = full_s = 0.0
    full = until = start
    # Layers become selective one by one; then, again from the first, each is recomputed in full.
    for step in range(2 * (stop - start) + 1):
        if step:
            layer = start + (step - 1) % (stop - start)
            # A layer that cannot be recomputed adds no option.
            if not layers.recomputable[layer]:
                continue
            if step > stop - start:
                full = layer + 1
                selective_s += layers.forward_s[layer] - layers.selective_s[layer]
                full_s += layers.forward_s[layer]
            else:
                until = layer + 1
                selective_s += layers.selective_s[layer]
        for alone in range(2 if start < full < until else 1):
            last = full if alone else until
            row = options[end]
            _measure(layers, split, start, stop, full, last, row)
            _count(row, capacity)
            in_flight = row[IN_FLIGHT]
            if in_flight:
                row[FULL], row[SELECTIVE] = full - start, max(0, last - full)
                recompute_s[end] = full_s if alone else selective_s
                _sort_in(begin, end, options, recompute_s)
                end += 1
            if not alone and in_flight >= most:
                return end
    return end


@no_refcount_inline
def _sort_in(begin: int, place: int, options: Integers, recompute_s: Floats) -> None:
    """Move the option in row `place` to its place among those from row `begin` on, sorted by their seconds."""
    while place > begin and recompute_s[place - 1] > recompute_s[place]:
        recompute_s[place - 1], recompute_s[place] = recompute_s[place], recompute_s[place - 1]
        for column in range(COLUMNS):
            own = options[place, column]
            options[place, column] = options[place - 1, column]
            options[place - 1, column] = own
        place -= 1


@no_refcount_inline
def _keep_best(most: int, begin: int, end: int, options: Integers, recompute_s: Floats) -> int:
    """Keep the options of rows `begin` to `end` that make more room than all before; return their new end."""
    found = begin
    in_flight = deferred = 0
    for place in range(begin, end):
        row = options[place]
        if row[IN_FLIGHT] > in_flight or (row[IN_FLIGHT] == in_flight and row[DEFERRED] > deferred):
            in_flight, deferred = row[IN_FLIGHT], row[DEFERRED]
            recompute_s[found] = recompute_s[place]
            for column in range(COLUMNS):
                options[found, column] = row[column]
            found += 1
        if in_flight >= most:
            break
    return found


@no_refcount_inline
def _measure(layers: LayerBytes, split: bool, start: int, stop: int, full: int, until: int, row: Integers) -> None:
    """Fill in the bytes of layers `start` to `stop`: the columns `EACH` to `FIXED` of an option, int64 [COLUMNS].

    Layers before `full` are recomputed in full, and from there to `until` selectively.
    """
    last = layers.output[stop - 1]
    # The graph of the last layer keeps the output, if there is one.
    kept_output = 0 if stop == full and layers.recomputable[stop - 1] else last
    kept = released = weight_grads = state = sample = 0
    forward = backward = working = 0
    for layer in range(start, stop):
        in_full = layer < full and layers.recomputable[layer]
        own = layers.boundary[layer] if in_full else _kept(layers, layer, until)
        extra = layers.selective_working[layer] if not in_full and layer < until else layers.working[layer]
        if in_full:
            extra += max(0, layers.activation[layer] - own)
        kept += own
        state += layers.state[layer]
        sample = max(sample, layers.sample[layer])
        working = max(working, layers.halves_working[layer])
        forward = max(forward, kept + layers.output[layer] + extra)
        # The gradient of the layer's input, and the output gradient unless it is the received message.
        input_grad = layers.output[layer - 1] if layer else 0
        output_grad = layers.output[layer] if layer + 1 < stop else 0
        output = layers.output[layer] if in_full else 0
        backward = max(backward, kept + kept_output + input_grad + extra + output + output_grad)
    in_input_grad = 0
    for layer in range(stop - 1, start - 1, -1):
        in_full = layer < full and layers.recomputable[layer]
        own = layers.boundary[layer] if in_full else _kept(layers, layer, until)
        in_part = not in_full and layer < until
        left = layers.selective_weight_grad[layer] if in_part else layers.weight_grad[layer]
        # Tensors that I keeps for W replace the activations if they take no less.
        released += own if left >= own else 0
        weight_grads += left
        restored = max(0, layers.activation[layer] - own) if left < layers.activation[layer] else 0
        input_grad = layers.output[layer - 1] if layer else 0
        output = layers.output[layer] if in_full else 0
        in_input_grad = max(
            in_input_grad,
            kept
            - released
            + kept_output
            + weight_grads
            + input_grad
            + layers.halves_working[layer]
            + output
            + restored,
        )
    row[FIXED] = state + sample
    row[EACH] = kept + last
    row[FORWARD] = forward
    # B starts from a received gradient; for I, that gradient is among the tensors left for W.
    row[BACKWARD] = in_input_grad if split and start > 0 else backward + last
    # The I of a first hop computes nothing: everything stays until W, which is a B.
    row[WAITING] = kept + kept_output + last if start == 0 else weight_grads
    row[WEIGHT] = backward + last if start == 0 else weight_grads + working
    if not split:
        row[WAITING] = row[WEIGHT] = 0


@no_refcount_inline
def _kept(layers: LayerBytes, layer: int, until: int) -> int:
    """Return the bytes of activations that a layer keeps; layers before `until` are recomputed selectively."""
    kept: int = layers.selective[layer] if layer < until else layers.activation[layer]
    return kept


@no_refcount_inline
def _count(row: Integers, capacity: int) -> None:
    """Fill in `SPARE`, `IN_FLIGHT` and `DEFERRED` of an option, int64 [COLUMNS], from its other columns."""
    row[SPARE] = spare = capacity - row[FIXED]
    row[IN_FLIGHT] = row[DEFERRED] = 0
    largest = max(row[FORWARD], row[BACKWARD], row[WEIGHT])
    if spare < largest:
        return
    row[IN_FLIGHT] = 1 + ((spare - max(row[FORWARD], row[BACKWARD])) // row[EACH] if row[EACH] > 0 else _UNLIMITED)
    row[DEFERRED] = 1 + ((spare - row[WEIGHT]) // row[WAITING] if row[WAITING] > 0 else _UNLIMITED)


@no_refcount_kernel
def fill_limits(
    rows: Integers,
    capacities: Integers,
    messages: Integers,
    micro_batches: int,
    split: bool,
    limits: Integers,
) -> bool:
    """Fill in the limits of each stage; return False if a stage cannot keep even one micro-batch.

    Limits are tried from the most that schedules profit from, a pipeline depth beyond 1F1B and ZB-H1, down to one
    micro-batch at a time, and the first that fit are taken. The number of W that wait is reduced before the
    micro-batches in flight fall below those of 1F1B. A stage gets at most one more in flight than the stage after it:
    others would wait in the channel, which holds one.

    Args:
        rows: the option of each stage, int64 [stages, COLUMNS].
        capacities: bytes of each worker, int64 [stages]; negative where memory is not checked.
        messages: bytes of buffers for messages, int64 [stages].
        micro_batches: of the pipeline.
        split: whether backward is split in two.
        limits: micro-batches in flight, micro-batches kept, and W that wait; int64 [3, stages], filled in.
    """
    depth = len(rows)
    for stage in range(depth - 1, -1, -1):
        base = depth - stage
        spare = capacities[stage] - rows[stage, FIXED] - messages[stage]
        chosen = False
        attempt = 0
        while not chosen:
            if attempt <= depth:
                in_flight = base + depth - attempt
                kept = deferred = (depth if split else base) + depth - attempt
            elif split and attempt <= 2 * depth:
                in_flight, deferred = base, 2 * depth + 1 - attempt
                kept = max(base, min(depth, base + deferred - 1))
            else:
                in_flight = base - (attempt - (2 * depth if split else depth))
                kept, deferred = in_flight, 1
                if in_flight < 1:
                    return False
            attempt += 1
            flying, resting = min(in_flight, micro_batches), min(deferred, micro_batches)
            needed = _needs(rows[stage], split, split and stage == 0, flying, min(kept, micro_batches), resting)
            chosen = capacities[stage] < 0 or needed <= spare
        if stage + 1 < depth:
            in_flight = min(in_flight, limits[0, stage + 1] + 1)
        limits[0, stage], limits[1, stage], limits[2, stage] = in_flight, kept, deferred
    return True


@no_refcount_inline
def _needs(row: Integers, split: bool, first: bool, in_flight: int, kept: int, deferred: int) -> int:
    """Return the most bytes that a stage holds under these limits beside its state and messages.

    `row` is its option, int64 [COLUMNS], and `first` says whether it is a first stage with split backward.
    """
    if not split:
        # The output of B is kept until the next operation begins.
        most: int = (in_flight - 1) * row[EACH] + max(row[FORWARD], row[BACKWARD], row[EACH])
        return most
    each, waiting = row[EACH], row[WAITING]
    worst: int = _held(each, waiting, in_flight, deferred, kept)
    worst = max(worst, _held(each, waiting, in_flight - 1, deferred, kept - 1) + row[FORWARD])
    worst = max(worst, _held(each, waiting, in_flight, deferred - 1, kept - 1) + row[WEIGHT])
    if not first:
        worst = max(worst, _held(each, waiting, in_flight - 1, deferred - 1, kept - 1) + row[BACKWARD])
    return worst


@no_refcount_inline
def _held(each: int, waiting: int, in_flight: int, deferred: int, kept: int) -> int:
    """Return the most bytes of up to so many micro-batches in flight and waiting W, at most `kept` together."""
    if each >= waiting:
        flying = min(in_flight, kept)
        resting = min(deferred, kept - flying)
    else:
        resting = min(deferred, kept)
        flying = min(in_flight, kept - resting)
    return flying * each + resting * waiting
