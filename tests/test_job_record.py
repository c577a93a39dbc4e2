"""The record of a job that a checkpoint keeps, and how it differs from that of another job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Batch, Parallel, RunConfig, parse_config
from chameleon_ft.job_record import JobRecord
from chameleon_ft.models.job_record import sketch
from chameleon_ft.worker.inspection import inspect_job

BLOCKS = """
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))
"""
JOB = """
from functools import partial

import torch
from blocks import Block
from torch import nn

from chameleon_ft import Job

class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = torch.randint(16, (5,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

def job(*, width=32):
    return Job(
        layers=[partial(nn.Embedding, 16, 8), Block, Block, partial(nn.Linear, 8, 16)],
        loss=loss,
        loss_terms=torch.numel,
        dataset=Data(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        learning_rate=lambda step: 1e-2,
        clip_norm=1.0,
    )
"""
CONFIG = RunConfig(workers=2, parallel=Parallel(dp=1, pp=2), batch=Batch(micro_batches=2, micro_batch_size=2), steps=20)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[..., JobRecord]]:
    """Record a job in a folder of its own, with replacements in its two files, and with another configuration."""
    paths, number = list(sys.path), iter(range(100))

    def record(*replacements: tuple[str, str], config: RunConfig = CONFIG) -> JobRecord:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        for name, text in (("my_job.py", JOB), ("blocks.py", BLOCKS)):
            for before, after in replacements:
                text = text.replace(before, after)
            (folder / name).write_text(text)
        sys.modules.pop("blocks", None)
        found = inspect_job(config.model_copy(update={"job": str(folder / "my_job.py")})).record
        return JobRecord.from_json(json.loads(json.dumps(found.to_json())))

    yield record
    sys.path[:] = paths
    sys.modules.pop("blocks", None)


def topics(before: JobRecord, now: JobRecord) -> set[str]:
    return {change.topic for change in before.changes_to(now)}


CHANGES = {
    "grown": (("return 40", "return 48"), {"data"}, "40"),
    "another order": (("manual_seed(index)", "manual_seed(39 - index)"), {"data"}, "sample"),
    "one sample": (("manual_seed(index)", "manual_seed(index + 100 * (index == 7))"), {"data"}, "target of sample 7"),
    "another class": (("Block", "Other"), {"layers"}, "Other"),
    "parameters of the same size": (("nn.Linear(8, 32), nn.Linear(32, 8)", "Up(), Down()"), {"layers"}, "layer 1"),
    "activation": (("F.gelu", "F.relu"), {"outputs"}, "layer 1"),
    "dropout": (("Dropout(0.1)", "Dropout(0.2)"), {"outputs"}, "layer 1"),
    "loss": (("targets.flatten(),", "targets.flatten(), label_smoothing=0.1,"), {"outputs"}, "loss"),
    "rate": (("lr=1e-2", "lr=1e-3"), {"settings"}, "0.001"),
    "schedule": (("step: 1e-2", "step: 1e-2 / (1 + step)"), {"settings"}, "learning_rate of step 10"),
    "optimizer": (("AdamW, lr", "SGD, lr"), {"settings"}, "SGD"),
    "the default of an argument": (("width=32", "width=64"), {"settings"}, "argument width was 32 and is 64"),
    "clipping": (("clip_norm=1.0", "clip_norm=None"), {"settings"}, "clip_norm"),
    "a comment": (("class Data", "# It is fast.\nclass Data"), set(), "my_job.py"),
    "a module beside it": (("class Block", "# Simple.\nclass Block"), set(), "blocks.py"),
}
UP_AND_DOWN = """
class Up(nn.Module):
    def __init__(self, bias=32):
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.ones(8, 32)), nn.Parameter(torch.ones(bias))

    def forward(self, x):
        return x @ self.kernel + self.bias

class Down(Up):
    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        return x @ self.kernel.T + self.bias

"""


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_named(recorded: Callable[..., JobRecord], change: str) -> None:
    replacement, expected, name = CHANGES[change]
    more = [("\nclass Block", f"import torch\n{UP_AND_DOWN}class Block")] if "Up()" in replacement[1] else []
    before, now = recorded(), recorded(replacement, *more)
    found = before.changes_to(now)
    # Whatever is changed, its file is.
    assert {each.topic for each in found} == expected | {"sources"}
    assert any(name in each.text for each in found)
    assert sum(each.topic == "outputs" for each in found) <= 1


def test_an_argument_that_is_set_is_a_change_and_equal_values_are_none(recorded: Callable[..., JobRecord]) -> None:
    before, equal, other = (CONFIG.model_copy(update={"job_arguments": {"width": text}}) for text in ("32", 32, "64"))
    assert recorded().changes_to(recorded(config=before)) == []
    assert recorded(config=before).changes_to(recorded(config=equal)) == []
    (change,) = recorded().changes_to(recorded(config=other))
    assert change.text == "argument width was 32 and is 64"


def test_the_layout_the_steps_and_the_folder_change_nothing(recorded: Callable[..., JobRecord]) -> None:
    changes = {"workers": 4, "parallel": Parallel(dp=4, pp=1), "steps": 50, "threads": 2}
    other = CONFIG.model_copy(update={**changes, "batch": Batch(micro_batches=8, micro_batch_size=2)})
    assert recorded().changes_to(recorded(config=other)) == []


def test_outputs_of_other_conditions_are_not_compared(recorded: Callable[..., JobRecord]) -> None:
    larger = CONFIG.model_copy(update={"batch": Batch(micro_batches=2, micro_batch_size=4)})
    assert recorded().changes_to(recorded(config=larger)) == []
    assert topics(recorded(), recorded(config=CONFIG.model_copy(update={"precision": "bf16"}))) >= {"settings"}


def test_a_record_of_an_earlier_version_or_with_more_is_read() -> None:
    assert JobRecord.from_json({"other": 1, "data": {"number of samples": 3}}).data == {"number of samples": 3}
    assert JobRecord.from_json({}).changes_to(JobRecord(data={"number of samples": 3})) == []


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=50), st.data())
def test_a_sketch_hardly_moves_with_rounding_and_does_with_a_change(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    scale = float(tensor.abs().max())
    rounded = tensor * (1 + 2**-22)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(values) - 1))] += max(scale, 1.0)

    def outputs(value: torch.Tensor) -> JobRecord:
        return JobRecord(outputs={"output": sketch(value)})

    assert outputs(tensor).changes_to(outputs(rounded)) == []
    assert len(outputs(tensor).changes_to(outputs(changed))) == 1
    assert len(outputs(tensor).changes_to(outputs(tensor.double()))) == 1
    integers = tensor.int()
    assert len(outputs(integers).changes_to(outputs(integers.flip(0) + 3000))) == 1
    halves = [JobRecord(outputs={"output": sketch(each.bfloat16())}) for each in (tensor, tensor * (1 + 2**-9))]
    assert halves[0].changes_to(halves[1]) == []


def test_what_is_not_a_number_is_equal_to_itself() -> None:
    broken = JobRecord(outputs={"output": sketch(torch.tensor([float("nan"), 1.0]))})
    assert broken.changes_to(JobRecord.from_json(json.loads(json.dumps(broken.to_json())))) == []
    assert len(broken.changes_to(JobRecord(outputs={"output": sketch(torch.ones(2))}))) == 1


def test_every_topic_is_compared() -> None:
    for each in fields(JobRecord):
        if each.name != "conditions":
            before, now = (JobRecord(**{each.name: {"name": value}}) for value in ("a", "b"))
            assert [change.topic for change in before.changes_to(now)] == [each.name]


def test_changes_are_accepted_for_one_start_by_a_setting() -> None:
    assert parse_config(RunConfig, {"accept_changes": ["data"]}, source="test").accept_changes == ("data",)
