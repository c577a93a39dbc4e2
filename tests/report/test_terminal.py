"""The terminal view."""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import get_args

import pytest
from rich.console import Console

from chameleon_ft.events.kinds import CheckpointComplete, Refused
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, NoticedBy
from chameleon_ft.events.summary import summarize
from chameleon_ft.report.story import notices_of
from chameleon_ft.report.terminal import TerminalView
from tests.report.records import failure_record, join_record, outcome_record, run_info, step_record


def shown(*, terminal: bool = False, failure: FailureRecord | None = None) -> str:
    """Return the output of a whole run."""
    failure = failure or failure_record(1)
    out = io.StringIO()
    view = TerminalView(Console(file=out, force_terminal=terminal, width=80, highlight=False))
    view.show(run_info())
    view.show(step_record(0, loss=2.5))
    view.show(Refused(address="a", reason="for the file only"))
    view.show(CheckpointComplete(step=1, message="step 1 is written to [here]"))
    view.show(failure)
    view.show(outcome_record(steps=1))
    view.show(outcome_record())
    view.finished(
        summarize(
            [step_record(0, loss=2.5)],
            [failure],
            samples_before=lambda step: 16 * step,
            status="finished",
            reason="all is done",
        )
    )
    view.close()
    return out.getvalue()


def test_it_reports_the_run_from_beginning_to_end() -> None:
    text = shown()
    for words in (
        "a [small] model",
        "some text",
        "runs/one",
        "layers 0-3",
        "worker 2",
        "2.5000",
        "checkpoint: step 1 is written to [here]",
        "worker 3 lost in step 1",
        "detected by  the end of its process",
        "reroute: micro-batches 2, 3 of worker 3 go to worker 1",
        "0.133 s = detect 0.010 + stop 0.020 + decide 0.003 + regroup 0.100",
        "after 1 step of repartition: step 410 ms (predicted 400 ms, +2.5%), stall",
        "after 10 steps of repartition: step",
        "all is done",
        "16 seen, 0 lost, 0 repeated",
    ):
        assert words in text
    assert "for the file only" not in text
    assert text.count("runs/one") == 2, "where the files are is the first and the last that one wants to know"


@pytest.mark.parametrize(("first_step", "words"), [(0, "1 of 20"), (12, "1 of 8, from the fork at step 12")])
def test_the_steps_of_a_fork_are_counted_from_its_beginning(first_step: int, words: str) -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out, width=80, highlight=False), steps=20)
    steps = [step_record(first_step)]
    view.finished(
        summarize(
            steps, [], samples_before=lambda step: 16 * step, first_step=first_step, status="finished", reason="done"
        )
    )
    view.close()
    (line,) = (line for line in out.getvalue().splitlines() if " steps " in line)
    assert line.strip("| ").split(maxsplit=1)[1].strip() == words


@pytest.mark.parametrize(
    ("measured_step_s", "measured_stall_s", "policy", "words"),
    [
        (0.42, 0.8, "repartition", []),
        (0.744, 0.8, "repartition", ["step time 86.0% off, 6% is tolerated.", "`chameleon profile CONFIG --out"]),
        (0.3, 0.2, "repair", ["step time 25.0% off", "; stall 73.3% off, 15% is tolerated.", "--profile FILE"]),
        (0.41, 300.0, "restart", ["set recovery.restart_cost_s to"]),
    ],
)
def test_a_prediction_that_is_far_off_is_not_to_be_trusted(
    measured_step_s: float, measured_stall_s: float, policy: str, words: list[str]
) -> None:
    record = dataclasses.replace(
        outcome_record(), measured_step_s=measured_step_s, measured_stall_s=measured_stall_s, policy=policy
    )
    out = io.StringIO()
    view = TerminalView(Console(file=out, width=300, highlight=False))
    view.show(record)
    view.close()
    assert ("prediction not to be trusted: " in out.getvalue()) == bool(words) == (record.warning is not None)
    assert all(each in out.getvalue() for each in words)
    assert out.getvalue().count("chameleon profile") == ("--profile FILE" in out.getvalue())


@pytest.mark.parametrize(("steps", "words"), [(0.25, "0.25 steps longer"), (-0.11, "0.11 steps less")])
def test_an_interrupted_step_may_take_less_than_a_usual_one(steps: float, words: str) -> None:
    record = FailureCostRecord(incident_generations=(2,), step=6, failure_cost_steps=steps, predicted_steps=0.5)
    (notice,) = notices_of(record)
    assert notice.title == f"step 6 took {words} (predicted 0.50)"


def test_there_is_no_warning_without_a_prediction() -> None:
    record = dataclasses.replace(outcome_record(), predicted_step_s=None, predicted_stall_s=None)
    assert record.warning is None


@pytest.mark.parametrize(
    ("generation", "checkpoint", "words"),
    [
        (1, None, None),
        (3, 40, "from    the checkpoint of step 40, the newest that is complete"),
        (3, None, "from    fresh weights: the run has no complete checkpoint to continue from"),
    ],
)
def test_the_header_names_the_restored_state(generation: int, checkpoint: int | None, words: str | None) -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out, width=80, highlight=False))
    view.show(dataclasses.replace(run_info(), generation=generation, checkpoint=checkpoint))
    view.close()
    found = [line.strip() for line in out.getvalue().splitlines() if line.strip().startswith("from")]
    assert found == ([] if words is None else [words])


def test_the_banner_has_the_moved_state() -> None:
    moved = dataclasses.replace(
        failure_record(1), transfer_s=0.25, moved_bytes=50_000_000, rounds=2, regroup_s=0.1, stall_s=0.383
    )
    text = " ".join(shown(failure=moved).replace("|", " ").split())
    assert "moved 50.0 MB in 2 rounds and 250 ms, 200.0 MB/s" in text
    assert "decide 0.003 + regroup 0.100 + transfer 0.250" in text
    assert "moved" not in shown()
    assert "+ transfer" not in shown()


@pytest.mark.parametrize(
    ("workers", "title"), [((3,), "worker 3 joined"), ((3, 5), "workers 3, 5 joined"), ((), "no worker joined")]
)
def test_a_join_has_a_banner(workers: tuple[int, ...], title: str) -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out, width=100, highlight=False))
    view.show(dataclasses.replace(join_record(17), workers=workers, spares=(6,)))
    view.close()
    text = " ".join(out.getvalue().replace("|", " ").split())
    for words in (
        f"{title} before step 17",
        "repartition: 2 pipelines of 4 stages",
        "spare worker 6",
        "moved 50.0 MB in 2 rounds and 250 ms, 200.0 MB/s",
        "0.373 s = stop 0.020 + decide 0.003 + regroup 0.100 + transfer 0.250",
        "at step 17 in generation 3",
    ):
        assert words in text


def test_a_file_gets_ascii_without_control_codes() -> None:
    assert shown().isascii()
    assert "\x1b" not in shown()


def test_a_pipe_that_is_not_read_holds_up_no_call_and_gets_all_later() -> None:
    is_read = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            assert is_read.wait(20.0)
            return super().write(text)

    out = Pipe()
    view = TerminalView(Console(file=out, width=80, highlight=False))
    for step in range(3):
        view.show(step_record(step))
    assert not out.getvalue()
    is_read.set()
    view.close()
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["0", "1", "2"]


def test_a_terminal_gets_colours_and_its_own_width() -> None:
    text = shown(terminal=True)
    assert "\x1b[" in text


def test_unknown_phases_are_omitted() -> None:
    text = shown(failure=failure_record(1, detect_s=None))
    assert "0.123 s = stop 0.020 + decide 0.003 + regroup 0.100" in text


def test_layers_without_a_holder_are_shown() -> None:
    failure = dataclasses.replace(failure_record(1), lost_layers=(4, 5))
    text = shown(failure=failure)
    assert "the last holder of layers 4-5" in text


@pytest.mark.parametrize("path", get_args(NoticedBy))
def test_every_detection_path_has_words(path: NoticedBy) -> None:
    assert "detected by" in shown(failure=dataclasses.replace(failure_record(1), noticed_by=path))


def test_many_pipelines_are_abridged() -> None:
    out = io.StringIO()
    view = TerminalView(Console(file=out))
    view.show(dataclasses.replace(run_info(), pipelines=tuple((index, index + 40) for index in range(40))))
    view.close()
    assert "and 24 more" in out.getvalue()
