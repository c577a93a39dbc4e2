"""Draws the picture of memory.md from predictions of `chameleon plan`: `python docs/memory.py`.

A bar shows the worker that needs most memory at its worst moment, by purpose, and a narrow one below it the host memory
of its snapshots. A test compares the figures in the picture with the predictions.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chameleon_ft.cli import main

PICTURE: Final = Path(__file__).parent / "pictures" / "memory.svg"
COMMAND: Final = ("plan", "--model", "llama2-13b", "--device", "a100-80g", "--dp", "4", "--pp", "4")
CASES: Final = [(precision, owners) for precision in ("fp32", "bf16") for owners in ("all", "2", "1")]
PARTS: Final = {
    "parameters": (("param_bytes",), "#2b6a94"),
    "gradients": (("gradient_bytes",), "#6aaed6"),
    "optimizer state and masters": (("optimizer_bytes",), "#c2410c"),
    "activations": (("activation_bytes", "weight_grad_bytes"), "#1f8a70"),
    "messages, samples, working memory": (("message_bytes", "sample_bytes", "working_bytes"), "#a3a3a3"),
}
SNAPSHOTS: Final = "#d9c7a7"
TEXT, PALE, LINE = "#1a1a1a", "#666666", "#d0d0d0"
GB: Final = 1e9


class Row(NamedTuple):
    """The memory of the worker that needs most, in bytes."""

    precision: str
    owners: str
    parts: Mapping[str, int]
    capacity: int
    snapshots: int

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step."""
        return sum(self.parts.values())

    @property
    def label(self) -> str:
        """The figure beside the bar."""
        over = self.peak - self.capacity
        return f"{self.peak / GB:.1f} GB" + (f", {over / GB:.1f} GB too much" if over > 0 else "")


def predicted(precision: str, owners: str) -> Row:
    """Return the prediction of `chameleon plan`."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*COMMAND, "--precision", precision, "--optimizer-redundancy", owners, "--json"])
    found = json.loads(out.getvalue())
    worker, peak = max(found["peak_memory_bytes"].items(), key=lambda item: item[1])
    sizes = found["peak_memory_parts"][worker]
    parts = {name: sum(sizes[field] for field in fields) for name, (fields, _) in PARTS.items()}
    assert sum(parts.values()) == peak
    capacity = found["capacity_bytes"][worker]
    return Row(precision, owners, parts, capacity, max(found["snapshot_bytes"].values(), default=0))


def figure_of(rows: list[Row]) -> Figure:
    """Return the picture of the predictions."""
    figure = Figure(figsize=(9.2, 4.4), dpi=130)
    axes = figure.add_axes((0.175, 0.115, 0.8, 0.70))
    places = [index + (0.5 if row.precision == "bf16" else 0.0) for index, row in enumerate(rows)]
    for place, row in zip(places, rows, strict=True):
        left = 0.0
        for name, (_, colour) in PARTS.items():
            size = row.parts[name] / GB
            axes.barh(place - 0.08, size, left=left, height=0.5, color=colour, linewidth=0)
            left += size
        axes.barh(place + 0.29, row.snapshots / GB, height=0.14, color=SNAPSHOTS, linewidth=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(left + 0.9, place - 0.08, row.label, va="center", fontsize=8, color=TEXT, bbox=box)
    axes.axvline(rows[0].capacity / GB, color=TEXT, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_yticks(places, [f"{row.precision}, {_owners(row.owners)}" for row in rows])
    axes.set_ylim(places[-1] + 0.5, -0.5)
    axes.set_xlim(0, 1.3 * max(row.peak for row in rows) / GB)
    axes.set_xlabel("memory of a worker (GB); dashed: what it has", fontsize=8.5, color=TEXT)
    axes.tick_params(colors=PALE, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)
    figure.text(
        0.015, 0.955, "Llama 2 13B in 4 pipelines of 4 stages", va="center", fontsize=10.5, weight="bold", color=TEXT
    )
    colours = [*(colour for _, colour in PARTS.values()), SNAPSHOTS]
    names = [*PARTS, "beside it, in host memory: two snapshots"]
    handles = [Patch(facecolor=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.17, 0.93),
        ncols=3,
        frameon=False,
        fontsize=7.5,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.4,
        labelcolor=TEXT,
    )
    return figure


def _owners(owners: str) -> str:
    return {"all": "not shared", "1": "1 owner"}.get(owners, f"{owners} owners")


if __name__ == "__main__":
    # The same picture wherever it is drawn.
    mpl.rcParams["svg.hashsalt"] = "memory"
    figure_of([predicted(*case) for case in CASES]).savefig(PICTURE, facecolor="white", metadata={"Date": None})
