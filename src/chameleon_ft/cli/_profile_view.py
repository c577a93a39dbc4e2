"""A profile in a terminal."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from pathlib import Path

from rich import box
from rich.table import Table

from chameleon_ft.cluster import Link
from chameleon_ft.observe.terminal import output
from chameleon_ft.profiles import Profile
from chameleon_ft.quantities import data_size, duration
from chameleon_ft.workload import LayerCost

__all__ = ["show"]


def show(profile: Profile, out: Path) -> None:
    """Print it."""
    console, shape = output()
    fingerprint = profile.fingerprint
    console.print(
        f"{profile.name} on {fingerprint.device}, micro-batches of {fingerprint.micro_batch_size}, {fingerprint.dtype}",
        style="bold",
        soft_wrap=True,
    )
    console.print(profile.provenance, soft_wrap=True)
    console.print(_layers(profile, shape))
    console.print(_facts(profile))
    console.print(f"written to {out}", soft_wrap=True)


def _layers(profile: Profile, shape: box.Box) -> Table:
    table = Table(box=shape)
    table.add_column("layers")
    for column in ("F", "B", "I", "W", "parameters", "kept F to B", "kept I to W", "output", "works with"):
        table.add_column(column, justify="right")
    for _, group in groupby(enumerate(profile.layers), key=lambda numbered: _kind(numbered[1])):
        layers = [layer for _, layer in group]
        names = layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"
        table.add_row(
            names,
            *(
                duration(sum(times) / len(times))
                for times in (
                    [layer.forward_s for layer in layers],
                    [layer.backward_s for layer in layers],
                    [layer.input_grad_s for layer in layers],
                    [layer.weight_grad_s for layer in layers],
                )
            ),
            data_size(layers[0].param_bytes),
            data_size(layers[0].activation_bytes),
            data_size(layers[0].weight_grad_bytes),
            data_size(layers[0].output_bytes),
            data_size(layers[0].working_bytes),
        )
    return table


def _kind(layer: LayerCost) -> LayerCost:
    """What layers of one kind have in common: all but their names and what was measured of their times."""
    return dataclasses.replace(
        layer, name="", forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, fused_backward_s=None
    )


def _facts(profile: Profile) -> Table:
    facts = Table(box=None, show_header=False, pad_edge=True)
    facts.add_row("operation", f"{duration(profile.operation_overhead_s)} beside its layers")
    facts.add_row("link in a host", _link(profile.intra_host))
    facts.add_row("link between hosts", "not measured" if profile.inter_host is None else _link(profile.inter_host))
    if profile.all_reduces:
        largest = max(profile.all_reduces, key=lambda reduce: (reduce.workers, reduce.num_bytes))
        ring_s = profile.intra_host.ring_all_reduce_s(largest.num_bytes, largest.workers)
        facts.add_row(
            "all-reduce",
            f"{data_size(largest.num_bytes)} over {largest.workers} workers in {duration(largest.time.median_s)}; "
            f"{duration(ring_s)} by the ring formula",
        )
    if profile.times:
        facts.add_row("spread", _spread(profile))
    capacity = "not checked" if profile.memory_bytes is None else data_size(profile.memory_bytes)
    facts.add_row("memory of a worker", capacity)
    return facts


def _link(link: Link) -> str:
    return f"{duration(link.latency_s)} + {data_size(link.bytes_per_s)}/s"


def _spread(profile: Profile) -> str:
    forward = profile.times[max(range(len(profile.times)), key=lambda i: profile.times[i].forward.median_s)].forward
    return (
        f"F of the slowest layer takes {duration(forward.least_s)} to {duration(forward.largest_s)}, "
        f"median of {forward.count}: {duration(forward.median_s)}"
    )
