"""Evidence of a hang: the last activities, and the line of code in the stacks as faulthandler and py-spy write them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.events.evidence import ENTRIES, ENTRY_BYTES, Evidence, activity_entry, place_of

RUNTIME = """\
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1747 in _call_impl
  File "/venv/lib/python3.12/site-packages/chameleon_ft/runtime/execution/executor.py", line 253 in _compute
  File "/venv/lib/python3.12/site-packages/chameleon_ft/runtime/rank.py", line 70 in rank_main
  File "/venv/lib/python3.12/site-packages/chameleon_ft/launch.py", line 265 in _call
  File "<string>", line 1 in <module>
"""
WAITER = """\
Thread 0x00007f704f7fe6c0 (most recent call first):
  File "/home/me/reader.py", line 3 in work
  File "/usr/lib/python3.12/threading.py", line 1045 in _bootstrap_inner

"""


def ring(*entries: bytes) -> str:
    return b"".join([*entries, *[activity_entry()] * (ENTRIES - len(entries))]).decode()


def place(*frames: str, before: str = WAITER, current: str = "Current thread") -> str | None:
    """The place of a hang with these innermost frames."""
    lines = "".join(f"  File {frame}\n" for frame in frames)
    return Evidence.parse(
        f"{ring()}{before}{current} 0x00007f708b9f6b80 (most recent call first):\n{lines}{RUNTIME}"
    ).place


def test_the_line_is_the_innermost_of_the_job() -> None:
    assert place('"/home/me/model.py", line 7 in forward') == "/home/me/model.py:7 in forward"
    inside = ('"/usr/lib/python3.12/threading.py", line 327 in wait', '"<frozen importlib>", line 1 in load')
    assert place(*inside, '"/home/me/model.py", line 7 in forward') == "/home/me/model.py:7 in forward"
    installed = "/venv/lib/python3.12/site-packages/my_model/layers.py"
    assert place(f'"{installed}", line 9 in forward') == f"{installed}:9 in forward"
    built_in = "/venv/lib/python3.12/site-packages/chameleon_ft/models/llama.py"
    assert place(f'"{built_in}", line 90 in forward') == f"{built_in}:90 in forward"


def test_without_a_line_of_the_job_it_is_one_of_the_runtime() -> None:
    found = place('"/usr/lib/python3.12/threading.py", line 327 in wait')
    assert found is not None
    assert found.endswith("torch/nn/modules/module.py:1747 in _call_impl")


def test_the_training_thread_is_told_by_where_it_began() -> None:
    assert place('"/home/me/model.py", line 7 in forward', current="Thread") == "/home/me/model.py:7 in forward"


def test_on_an_accelerator_the_line_is_one_of_the_thread_that_runs_the_backward() -> None:
    waits = '"/venv/lib/python3.12/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward'
    runs = """\
Thread 0x00007f704e7fc6c0 (most recent call first):
  File "/home/me/model.py", line 12 in backward
  File "/venv/lib/python3.12/site-packages/torch/autograd/function.py", line 311 in apply

"""
    layer = '"/home/me/model.py", line 30 in forward'
    started = WAITER.replace("_bootstrap_inner", '_bootstrap_inner\n  File "/usr/threading.py", line 1 in _bootstrap')
    assert place(waits, layer, before=started + runs) == "/home/me/model.py:12 in backward"
    assert place(waits, layer, before=started) == "/home/me/model.py:30 in forward", "no other thread runs one"
    inner = '"/home/me/model.py", line 7 in hook'
    assert place(inner, waits, before=started + runs) == "/home/me/model.py:7 in hook", "it runs the backward itself"


def test_names_in_other_scripts_are_as_the_user_has_written_them() -> None:
    escaped = r'"/home/me/Mod\xe8le \u6a21\U0001f40d/net.py", line 7 in vorw\xe4rts'
    assert place(escaped) == "/home/me/Mod\xe8le \u6a21\U0001f40d/net.py:7 in vorw\xe4rts"


def test_the_stacks_of_py_spy() -> None:
    text = """
Process 62: python
Thread 62 (idle): "MainThread"
    wait (/usr/lib/python3.12/threading.py:327)
    forward (/home/me/model.py:7)
    rank_main (/venv/lib/python3.12/site-packages/chameleon_ft/runtime/rank.py:70)
Thread 63 (idle): "slow io"
    work (/home/me/reader.py:3)
"""
    assert Evidence.parse(ring() + text).place == "/home/me/model.py:7 in forward"


def test_the_last_activity() -> None:
    read = activity_entry(1.0, "reading sample 7", waiting=True, is_reading=True)
    evidence = Evidence.parse(ring(activity_entry(3.0, "sync", waiting=True), read, activity_entry(2.0, "F1")))
    assert [str(entry) for entry in evidence.activities] == ["reading sample 7", "in F1", "waiting: sync"]
    assert evidence.last is not None
    assert evidence.last.time == 3.0
    assert evidence.place is None


@given(st.floats(0.0, 1e10), st.text(), st.booleans())
def test_an_entry_has_a_fixed_size_and_one_line(time: float, doing: str, waiting: bool) -> None:
    entry = activity_entry(time, doing, waiting=waiting)
    assert len(entry) == ENTRY_BYTES
    assert entry.endswith(b"\n")


@pytest.mark.parametrize("doing", ["F3", "the forward of micro-batch 3 in layers 2-5 in step 12"])
def test_an_activity_is_read_as_it_was_written(doing: str) -> None:
    (entry,) = Evidence.parse(ring(activity_entry(1.5, doing))).activities
    assert (entry.time, entry.waiting, entry.doing) == (1.5, False, doing)


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    Evidence.parse(text)
    _ = Evidence.parse(ring() + text).place


def test_the_place_of_an_error_is_the_innermost_of_the_job() -> None:
    def forward() -> None:
        torch.zeros(2).view(3)

    with pytest.raises(RuntimeError) as raised:
        forward()
    line = forward.__code__.co_firstlineno + 1
    assert place_of(raised.value) == f"{__file__}:{line} in forward"
    with pytest.raises(json.JSONDecodeError) as decoded:
        json.loads("{")
    own = decoded.value.with_traceback(decoded.tb.tb_next)
    assert place_of(own) is None, "only Python's own code"
