"""Pictures of failures: the operations of each worker in the interrupted step and in the next one.

Importing this module loads matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.events.summary import failures_in
from chameleon_ft.quantities import duration
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.report.comparison import planned_operations
from chameleon_ft.report.picture import fit_title, require_picture, save_picture
from chameleon_ft.report.schedule_picture import KIND_STYLES
from chameleon_ft.schedule import OperationKind
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.timelines import RecordedStep

_STALL: Final = "#f6d5d5"
_REDUCTION: Final = "#35195a"
_LINE: Final = "#666666"
# All lengths are in inches.
_ROW_HEIGHT: Final = 0.24
_MIN_HEIGHT: Final = 1.2
_WIDTH: Final = 11.0
_LEFT: Final = 0.9
_RIGHT: Final = 0.2
_TOP: Final = 1.05
_BOTTOM: Final = 0.55
_DPI: Final = 150


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure and the records around it; times are Unix seconds, `lost` the workers that were lost
    together, `commits` the times of the commits by step."""

    record: FailureRecord
    lost: tuple[int, ...]
    commits: Mapping[int, float]
    recorded: Sequence[RecordedStep]

    @property
    def failed_at(self) -> float:
        return self.record.time - self.record.stall_s


def draw_failure(
    path: Path, run: RunDirectory, number: int, plans: Mapping[int, GenerationSpec], recorded: Sequence[RecordedStep]
) -> None:
    """Draw a failure: workers down, time across, from the beginning of the interrupted step until after the next one.

    Args:
        path: file to write or replace, with the suffix .svg, .png or .pdf.
        number: The number of the failure in the run, from 1; workers lost together count as one.
        recorded: the recorded steps of the run.

    Raises:
        ConfigError: there is no such failure, its step was not recorded, a record does not fit its plan, another
            suffix, matplotlib is not installed, or the file cannot be written.
    """
    require_picture(path)
    failure = _find(run, number, recorded)
    workers = sorted({record.worker for record in failure.recorded} | set(failure.lost))
    title = f"{run.path.name}: {_describe(failure)}"
    height = max(_MIN_HEIGHT, _ROW_HEIGHT * len(workers))
    size = _WIDTH, _TOP + height + _BOTTOM
    figure = Figure(figsize=size, dpi=_DPI)
    axes = figure.add_axes(
        (_LEFT / size[0], _BOTTOM / size[1], 1 - (_LEFT + _RIGHT) / size[0], height / size[1]), ylim=(len(workers), 0)
    )
    origin = min(record.time for record in failure.recorded)
    end = max(record.time + record.end_s for record in failure.recorded)
    axes.set_xlim(0.0, end - origin)
    axes.set_yticks([row + 0.5 for row in range(len(workers))], [f"worker {worker}" for worker in workers], fontsize=8)
    axes.set_xlabel("seconds since the start of the interrupted step", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.axvspan(failure.failed_at - origin, failure.record.time - origin, color=_STALL, linewidth=0)
    for row, worker in enumerate(workers):
        own = [record for record in failure.recorded if record.worker == worker]
        for kind, spans in _spans(own, plans, origin).items():
            axes.broken_barh(spans, (row + 0.1, 0.62), facecolors=KIND_STYLES[kind].fill, linewidth=0)
        reductions = [
            (record.time - origin + each.start_s, each.end_s - each.start_s)
            for record in own
            for each in record.reductions
        ]
        axes.broken_barh(reductions, (row + 0.74, 0.16), facecolors=_REDUCTION, linewidth=0)
        if worker in failure.lost:
            axes.text(failure.failed_at - origin, row + 0.5, " lost ", size=8, va="center", ha="right", style="italic")
    for step, committed_at in failure.commits.items():
        if origin + 0.1 * (end - origin) < committed_at <= end:  # the commit before has no room for its name
            axes.axvline(committed_at - origin, color=_LINE, linewidth=0.9, linestyle="--")
            axes.text(committed_at - origin, -0.15, f"step {step} committed ", size=8, ha="right", color=_LINE)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    fitted, points = fit_title(title, width=72 * (_WIDTH - 0.2), size=12.0)
    figure.text(0.1 / size[0], 1 - 0.12 / size[1], fitted, size=points, weight="bold", va="top", parse_math=False)
    kinds = {kind for record in failure.recorded for kind in _kinds_of(record, plans)}
    handles = [
        Patch(color=style.fill, label=f"{kind}  {style.name}") for kind, style in KIND_STYLES.items() if kind in kinds
    ]
    handles += [Patch(color=_REDUCTION, label="gradient all-reduce"), Patch(color=_STALL, label="stall")]
    top = 1 - 0.36 / size[1]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, top), ncols=len(handles), frameon=False, fontsize=8
    )
    save_picture(figure, path, title=title)


def _find(run: RunDirectory, number: int, recorded: Sequence[RecordedStep]) -> _Failure:
    """Find a failure and the records of the two steps that it concerns."""
    incidents: dict[int, list[FailureRecord]] = {}
    for failure in failures_in(run.readable_events()[0]):
        if failure.stall_s and failure.policy != "none":
            incidents.setdefault(failure.generation, []).append(failure)
    known = f"it has {len(incidents)}" if incidents else "no failure interrupted it"
    if not 1 <= number <= len(incidents):
        raise ConfigError(f"--failure {number}: {run.path} has no such failure; {known}")
    found = list(incidents.values())[number - 1]
    record = found[0]
    commits = {step.step: step.time for step in run.readable_steps()[0]}
    concerned = [
        each
        for each in recorded
        if each.step in (record.step, record.step + 1) and each.time + each.end_s > record.time - record.stall_s
    ]
    if not any(each.part == "interrupted" for each in concerned):
        raise ConfigError(
            f"--failure {number}: step {record.step}, which it interrupted, was not recorded; "
            "a run records such steps if timelines.every is above 0"
        )
    return _Failure(record, tuple(sorted({each.worker for each in found})), commits, concerned)


def _describe(failure: _Failure) -> str:
    record, lost = failure.record, ", ".join(map(str, failure.lost))
    how = "completed" if record.is_salvaged else "repeated"
    cost = "" if record.failure_cost_steps is None else f" and cost {record.failure_cost_steps:.2f} steps"
    workers = f"the loss of worker{'s' if len(failure.lost) > 1 else ''} {lost}"
    return f"{workers} stopped training for {duration(record.stall_s)}{cost}; step {record.step} was {how}"


def _kinds_of(record: RecordedStep, plans: Mapping[int, GenerationSpec]) -> Iterator[OperationKind]:
    if record.part != "whole":
        yield from map(OperationKind, record.kinds)
    else:
        yield from (operation.kind for operation in planned_operations(record, plans))


def _spans(
    records: Sequence[RecordedStep], plans: Mapping[int, GenerationSpec], origin: float
) -> dict[OperationKind, list[tuple[float, float]]]:
    """Return (start, duration) of the operations of a worker, by kind, in seconds since `origin`."""
    spans: dict[OperationKind, list[tuple[float, float]]] = {}
    for record in records:
        offset = record.time - origin
        for kind, (start, end) in zip(_kinds_of(record, plans), record.operations, strict=True):
            spans.setdefault(kind, []).append((offset + start, end - start))
    return spans
