"""The records of a run as TensorBoard's event files; importing this module loads tensorboard, but no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary as Values  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from chameleon_ft.observe.recorder import View
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OtherRecord,
    OutcomeRecord,
    RunRecord,
    StepRecord,
)
from chameleon_ft.observe.story import PHASES, tell

__all__ = ["TensorBoardView"]


class TensorBoardView(View):
    """Writes scalars of steps, incidents and outcomes, and as text what the terminal prints.

    Values of steps that are trained again, or that an earlier process has written to the folder, are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))
        self._step = 0
        self._begin(0)

    def step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        if record.step < self._step:
            self._begin(record.step)
        self._step = record.step
        self._scalars(
            {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/learning_rate": record.lr,
                "pace/step_s": record.step_s,
                "pace/tokens_per_s": record.tokens_per_s,
                "run/workers": record.workers,
                "run/generation": record.generation,
            },
            at=record.time,
        )

    def failure(self, record: FailureRecord) -> None:
        """Write the phases of a stall."""
        phases = {f"failures/{name}_s": getattr(record, field) or 0.0 for field, name in PHASES.items()}
        self._scalars({**phases, "failures/stall_s": record.stall_s, "failures/repeated_s": record.repeated_s or 0.0})
        self._tell(record)

    def failure_cost(self, record: FailureCostRecord) -> None:
        """Write the cost of an incident."""
        self._scalars({"failures/cost_steps": record.failure_cost_steps})
        self._tell(record)

    def outcome(self, record: OutcomeRecord) -> None:
        """Write how far a prediction was off."""
        errors = {"predictions/step_error": record.step_error, "predictions/stall_error": record.stall_error}
        self._scalars({name: error for name, error in errors.items() if error is not None})
        self._tell(record)

    def join(self, record: JoinRecord) -> None:
        """Write the stall of a switch."""
        self._scalars({"switches/stall_s": record.stall_s})
        self._tell(record)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write the message of an event, and the costs of a checkpoint."""
        if name == "checkpoint":
            self._scalars({"checkpoints/copy_s": fields["copy_s"], "checkpoints/write_s": fields["write_s"]})
        self._tell(OtherRecord(name, fields))

    def close(self) -> None:
        """Write all that waits."""
        self._writer.close()

    def _begin(self, step: int) -> None:
        """Have TensorBoard forget what was written of this step and later ones."""
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def _scalars(self, values: Mapping[str, float], *, at: float | None = None) -> None:
        found = [Values.Value(tag=tag, simple_value=value) for tag, value in values.items() if math.isfinite(value)]
        self._write(Values(value=found), at=at)

    def _tell(self, record: RunRecord) -> None:
        for told in tell(record):
            facts = "".join(f"\n- {name}: {value}" for name, value in told.facts)
            text = TensorProto(
                dtype=DT_STRING,
                string_val=[f"{told.title}\n{facts}".encode()],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            )
            metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            self._write(Values(value=[Values.Value(tag="events", tensor=text, metadata=metadata)]))

    def _write(self, values: Values, *, at: float | None = None) -> None:
        self._writer.add_event(Event(wall_time=at or time.time(), step=self._step, summary=values))
