"""Bytes that stages hold for their micro-batches, and how many micro-batches fit a worker with one stage.

`chameleon_ft.cost.memory` describes the terms.
"""

from __future__ import annotations

from typing import Any, Final

from chameleon_ft.cost._kernels.records import LayerFigures
from chameleon_ft.schedule.jit import no_refcount_inline, no_refcount_kernel
from chameleon_ft.schedule.records import Integers, Records

# More micro-batches than any step has.
_UNLIMITED: Final = 2**40
# Indices of `stage`: bytes of the input from below, of the output to above, of the activations that are kept, of the
# tensors that I leaves for W, and of the output if the layers keep it themselves.
BELOW, ABOVE, KEPT, LEFT, OUTPUT = range(5)
# Kinds of operations, as in program records.
_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = range(4)


@no_refcount_kernel
def measure_stages(layers: LayerFigures, rows: Integers, stages: Integers, moments: Integers) -> None:
    """Fill in `stage` and `moments`, as in `_measure`, of each row.

    Args:
        layers: layers of the model.
        rows: start, stop, start of recomputation, its stop, and how many of these layers are recomputed selectively;
            int64 [rows, 5].
        stages: int64 [rows, 5], filled in.
        moments: int64 [rows, 4, 4], filled in.
    """
    for row in range(len(rows)):
        start, stop, begin, until, selective = rows[row]
        _measure(layers, start, stop, begin, until - selective, until, stages[row], moments[row])


@no_refcount_inline
def _measure(
    layers: LayerFigures, start: int, stop: int, begin: int, full: int, until: int, stage: Integers, moments: Integers
) -> None:
    """Fill in what the layers `start` to `stop` hold for a micro-batch, and the worst moment of each operation on them.

    Args:
        layers: layers of the model.
        start, stop: layers of the stage.
        begin, full, until: layers from `begin` to `full` are recomputed in full, and from there to `until` selectively.
        stage: bytes of a micro-batch, by the indices above; int64 [5], filled in.
        moments: bytes while the most expensive layer of an operation runs, of activations, of tensors for W, of
            messages and of work space, by kind of operation; int64 [4, 4], filled in.
    """
    above = layers.output[stop - 1]
    ends_in_full = begin <= stop - 1 < full and layers.is_recomputable[stop - 1]
    # The graph of the last layer keeps the output, unless that layer is recomputed in full.
    output = 0 if ends_in_full else above
    forward = backward = input_grad = weight_grad = -1
    kept = left = 0
    for layer in range(start, stop):
        own, own_left, working, again, _ = _layer(layers, begin, full, until, layer)
        kept += own
        left += own_left
        # The gradient of the first layer's input is the message that is sent.
        sent = layers.input[layer] if layer == start else 0
        received = layers.input[layer] - sent + (layers.output[layer] if layer + 1 < stop else 0)
        if kept + layers.output[layer] + working > forward:
            forward = kept + layers.output[layer] + working
            _set(moments[_FORWARD], kept + layers.output[layer], 0, 0, working)
        if kept + output + sent + working + again + received > backward:
            backward = kept + output + sent + working + again + received
            _set(moments[_BACKWARD], kept + output, 0, sent, working + again + received)
        weight_grad = max(weight_grad, layers.halves_working[layer])
    _set(moments[_WEIGHT_GRAD], 0, left, 0, weight_grad)
    still_kept, left_so_far = kept, 0
    for layer in range(stop - 1, start - 1, -1):
        own, own_left, _, again, rest = _layer(layers, begin, full, until, layer)
        # Tensors that I keeps for W replace the activations if they take no less.
        still_kept -= own if own_left >= own else 0
        left_so_far += own_left
        sent = layers.input[layer] if layer == start else 0
        # If all activations stay for W, those that are made again are among them.
        restored = rest if own_left < layers.activation[layer] else 0
        working = layers.halves_working[layer] + again + restored + layers.input[layer] - sent
        if still_kept + output + left_so_far + sent + working >= input_grad:
            input_grad = still_kept + output + left_so_far + sent + working
            _set(moments[_INPUT_GRAD], still_kept + output, left_so_far, sent, working)
    stage[BELOW], stage[ABOVE], stage[KEPT], stage[LEFT], stage[OUTPUT] = layers.input[start], above, kept, left, output


@no_refcount_inline
def _layer(layers: LayerFigures, begin: int, full: int, until: int, layer: int) -> tuple[int, int, int, int, int]:
    """Return bytes of a layer: kept from F, left for W, of work space in F and B, of its output and of the activations
    that its backward makes again."""
    kept, left, working = layers.activation[layer], layers.weight_grad[layer], layers.working[layer]
    if not (begin <= layer < until and layers.is_recomputable[layer]):
        return kept, left, working, 0, 0
    if layer < full:
        rest = max(0, kept - layers.input[layer])
        return layers.input[layer], left, working + rest, layers.output[layer], rest
    rest = max(0, kept - layers.selective[layer])
    return layers.selective[layer], layers.selective_weight_grad[layer], layers.selective_working[layer], 0, rest


@no_refcount_inline
def _total(moment: Integers) -> int:
    total: int = moment[0] + moment[1] + moment[2] + moment[3]
    return total


@no_refcount_inline
def _set(moment: Integers, activations: int, weight_grads: int, messages: int, working: int) -> None:
    moment[0], moment[1], moment[2], moment[3] = activations, weight_grads, messages, working


@no_refcount_kernel
def fill_options(
    layers: LayerFigures,
    capacity: int,
    split: bool,
    most: int,
    first: Integers,
    options: Records,
    stage: Integers,
    moments: Integers,
) -> int:
    """Fill in the recomputation options of every stage on a worker with `capacity` bytes; return their number.

    Some layers from the first one on are recomputed selectively; or in full, and all others selectively or not at all.
    Options are sorted by their seconds, and kept if at least one micro-batch fits and more micro-batches can be in
    flight, or more W can wait, than with all options before.

    Args:
        layers: layers of the model.
        capacity: bytes of the worker.
        split: backward is split in two.
        most: number of micro-batches in flight beyond which more room is useless.
        first: row of the first option of each stage in `options`, int64 [L + 1, L + 2], filled in; the options of
            (start, stop) end where those of (start, stop + 1) begin.
        options: `OPTION` [options], filled in; there must be room for 3 (stop - start) + 1 options of each stage, and
            one more to work in.
        stage, moments: int64 [5] and [4, 4], to work in.
    """
    num_layers = len(layers.state)
    found = 0
    for start in range(num_layers + 1):
        for stop in range(num_layers + 2):
            first[start, stop] = found
            if start < stop <= num_layers:
                end = _fill_stage(layers, capacity, split, most, start, stop, found, options, stage, moments)
                found = _keep_best(most, found, end, options)
        first[start, num_layers + 1] = found
    return found


@no_refcount_inline
def _fill_stage(
    layers: LayerFigures,
    capacity: int,
    split: bool,
    most: int,
    start: int,
    stop: int,
    begin: int,
    options: Records,
    stage: Integers,
    moments: Integers,
) -> int:
    """Fill in the options of a stage that fit a micro-batch, sorted by seconds, from row `begin` on; return their end.

    Arguments are as for `fill_options`.
    """
    end = begin
    fixed = sample = 0
    for layer in range(start, stop):
        fixed += layers.state[layer]
        sample = max(sample, layers.sample[layer])
    # Seconds with layers recomputed selectively or, up to `full`, in full; and with only the latter.
    selective_s = full_s = 0.0
    full = until = start
    # Layers become selective one by one; then, again from the first, each is recomputed in full.
    for step in range(2 * (stop - start) + 1):
        if step:
            layer = start + (step - 1) % (stop - start)
            # A layer that cannot be recomputed adds no option.
            if not layers.is_recomputable[layer]:
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
            _measure(layers, start, stop, start, full, last, stage, moments)
            row.fixed, row.spare = fixed + sample, capacity - fixed - sample
            _count(row, stage, moments, split, start == 0)
            in_flight = row.in_flight
            if in_flight:
                row.full, row.selective = full - start, last - full
                row.recompute_s = full_s if alone else selective_s
                _sort_in(begin, end, options)
                end += 1
            if not alone and in_flight >= most:
                return end
    return end


@no_refcount_inline
def _sort_in(begin: int, place: int, options: Records) -> None:
    """Move the option in row `place` to its place among those from row `begin` on, sorted by their seconds."""
    spare = len(options) - 1
    options[spare] = options[place]
    while place > begin and options[place - 1].recompute_s > options[spare].recompute_s:
        options[place] = options[place - 1]
        place -= 1
    options[place] = options[spare]


@no_refcount_inline
def _keep_best(most: int, begin: int, end: int, options: Records) -> int:
    """Keep the options of rows `begin` to `end` that make more room than all before; return their new end."""
    found = begin
    in_flight = deferred = 0
    for place in range(begin, end):
        row = options[place]
        if row.in_flight > in_flight or (row.in_flight == in_flight and row.deferred > deferred):
            in_flight, deferred = row.in_flight, row.deferred
            options[found] = row
            found += 1
        if in_flight >= most:
            break
    return found


@no_refcount_inline
def _count(row: Any, stage: Integers, moments: Integers, split: bool, first: bool) -> None:
    """Fill in what a micro-batch needs, and how many fit: the fields from `in_flight` to `weight` of an `OPTION`.

    Args:
        row: an option whose `spare` is set.
        stage, moments: as in `_measure`.
        split: backward is split in two.
        first: it is a first stage.
    """
    above = stage[ABOVE]
    # B starts from a received gradient; for I, that gradient is among the tensors left for W.
    whole_backward = _total(moments[_BACKWARD]) + above
    row.each = stage[KEPT] + above
    row.forward = _total(moments[_FORWARD])
    row.backward = _total(moments[_INPUT_GRAD]) if split and not first else whole_backward
    row.waiting = row.weight = 0
    if split and first:
        # The I of a first hop computes nothing: everything stays until W, which is a B.
        row.waiting, row.weight = stage[KEPT] + stage[OUTPUT] + above, whole_backward
    elif split:
        row.waiting, row.weight = stage[LEFT], _total(moments[_WEIGHT_GRAD])
    row.in_flight = row.deferred = 0
    if row.spare >= max(row.forward, row.backward, row.weight):
        own = row.spare - max(row.forward, row.backward)
        row.in_flight = 1 + (own // row.each if row.each > 0 else _UNLIMITED)
        row.deferred = 1 + ((row.spare - row.weight) // row.waiting if row.waiting > 0 else _UNLIMITED)


@no_refcount_kernel
def fill_limits(
    options: Records,
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
        options: the option of each stage, `OPTION` [stages].
        capacities: bytes of each worker, int64 [stages]; negative where memory is not checked.
        messages: bytes of buffers for messages, int64 [stages].
        micro_batches: micro-batches of the pipeline.
        split: backward is split in two.
        limits: micro-batches in flight, micro-batches kept, and W that wait; int64 [3, stages], filled in.
    """
    depth = len(options)
    for stage in range(depth - 1, -1, -1):
        base = depth - stage
        spare = capacities[stage] - options[stage].fixed - messages[stage]
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
            needed = _needs(options[stage], split, split and stage == 0, flying, min(kept, micro_batches), resting)
            chosen = capacities[stage] < 0 or needed <= spare
        if stage + 1 < depth:
            in_flight = min(in_flight, limits[0, stage + 1] + 1)
        limits[0, stage], limits[1, stage], limits[2, stage] = in_flight, kept, deferred
    return True


@no_refcount_inline
def _needs(option: Any, split: bool, first: bool, in_flight: int, kept: int, deferred: int) -> int:
    """Return the most bytes that a stage holds under these limits beside its state and messages.

    `option` is an `OPTION`, and `first` says whether it is that of a first stage with split backward.
    """
    each, waiting = option.each, option.waiting
    if not split:
        # The output of B is kept until the next operation begins.
        most: int = (in_flight - 1) * each + max(option.forward, option.backward, each)
        return most
    worst: int = _held(each, waiting, in_flight, deferred, kept)
    worst = max(worst, _held(each, waiting, in_flight - 1, deferred, kept - 1) + option.forward)
    worst = max(worst, _held(each, waiting, in_flight, deferred - 1, kept - 1) + option.weight)
    if not first:
        worst = max(worst, _held(each, waiting, in_flight - 1, deferred - 1, kept - 1) + option.backward)
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
