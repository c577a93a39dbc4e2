"""The records of a run as TensorBoard's event files; importing this module loads tensorboard, but no torch."""

from __future__ import annotations

import os
import socket
import time
from io import BytesIO
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as Values
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.report.sinks.sink import scalars_of
from chameleon_ft.report.story import Notice, notices_of

_VERSION: Final = "brain.Event:2"


class TensorBoardSink:
    """Writes the scalars of records, and as text what the terminal prints.

    Values of steps that are trained again, or that an earlier process has written to the folder, are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._file = _EventFile(folder)
        self._step: int | None = None

    def take(self, record: Record) -> bool:
        """See `Sink`."""
        step = record.step if isinstance(record, StepRecord) else self._step or 0
        if self._step is None or step < self._step:
            # TensorBoard forgets what was written of this step and later ones.
            start = SessionLog(status=SessionLog.START)
            self._file.append(Event(wall_time=record.time, step=step, session_log=start))
        self._step = step
        values = [Values.Value(tag=tag, simple_value=value) for tag, value in scalars_of(record).items()]
        values += [_text(notice) for notice in notices_of(record)]
        if values:
            self._file.append(Event(wall_time=record.time, step=step, summary=Values(value=values)))
        return bool(values)

    def close(self) -> None:
        """See `Sink`."""


class _EventFile:
    """A new file of events, in which each event is whole.

    TensorBoard's own writer writes in a thread, and a full disk ends that for good.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._size = 0
        self.append(Event(wall_time=time.time(), file_version=_VERSION))

    def append(self, event: Event) -> None:
        """Append an event. Raises OSError, and leaves the file as it was, if it cannot be written."""
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        try:
            with self._path.open("ab") as file:
                file.write(record.getbuffer())
        except OSError:
            if self._path.exists():
                os.truncate(self._path, self._size)
            raise
        self._size += record.tell()


def _text(notice: Notice) -> Values.Value:
    facts = "".join(f"\n- {name}: {value}" for name, value in notice.facts)
    text = TensorProto(
        dtype=DT_STRING,
        string_val=[f"{notice.title}\n{facts}".encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Values.Value(tag="events", tensor=text, metadata=metadata)
