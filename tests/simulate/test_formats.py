"""The formats of traces: what each says, and what is said about text that is none of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats import (
    RESOLUTION_S,
    load_trace,
    load_trace_for,
    parse_trace,
    save_trace,
    trace_to_jsonl,
)
from chameleon_ft.simulate.traces.trace import Trace
from tests.golden import refused
from tests.simulate.live import live_at
from tests.simulate.traces import Case, cases

DAY_S = 86_400.0
GPU = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "xid"}
FAN = {"Level": "Hardware Failure", "Class": "Fan", "Desc": "slow"}
HEADER = '{"chameleon_trace": 1, "workers": 4, "workers_per_host": 2, "duration_s": 10, "name": "small"}\n'


def element(node: str, days: float, kind: str, cause: object = GPU) -> dict[str, object]:
    return {"node_id": node, "event_time": days, "event_type": kind, "fault_type": cause}


def start(node: str, days: float, cause: object = GPU) -> dict[str, object]:
    return element(node, days, "fault_start", cause)


def end(node: str, days: float, cause: object = GPU) -> dict[str, object]:
    return element(node, days, "fault_end", cause)


def happenings(trace: Trace) -> list[tuple[float, str, tuple[int, ...]]]:
    return [(event.time_s, event.kind, event.workers) for event in trace.events]


class TestJsonLines:
    @given(case=cases())
    def test_a_written_trace_is_read_again(self, case: Case) -> None:
        assert parse_trace(trace_to_jsonl(case.trace)) == case.trace

    def test_a_line_describes_an_event(self) -> None:
        lines = (
            '{"time_s": 1, "kind": "lost", "workers": [0, 1], "cause": "power"}',
            '{"time_s": 2.5, "kind": "slow", "workers": [3], "speed": 0.5}',
            '{"time_s": 4, "kind": "back", "workers": [1]}',
        )
        trace = parse_trace(HEADER + "\n".join(lines))
        assert (trace.workers, trace.workers_per_host, trace.duration_s, trace.name) == (4, 2, 10, "small")
        assert happenings(trace) == [(1, "lost", (0, 1)), (2.5, "slow", (3,)), (4, "back", (1,))]
        assert [(event.cause, event.speed) for event in trace.events] == [("power", 1), ("", 0.5), ("", 1)]

    def test_a_host_has_one_worker_and_a_trace_no_name_unless_it_says_so(self) -> None:
        trace = parse_trace('{"chameleon_trace": 1, "workers": 4, "duration_s": 10}')
        assert (trace.hosts, trace.name, trace.events) == (4, "", ())

    @pytest.mark.parametrize(
        "line",
        [
            '{"time_s": 1, "kind": "lost"}',
            '{"time_s": 1, "kind": "lost", "workers": [0], "worker": 1}',
            '{"time_s": 1, "time_s": 2, "kind": "lost", "workers": [0]}',
            '{"time_s": NaN, "kind": "lost", "workers": [0]}',
            '{"time_s": 1e999, "kind": "lost", "workers": [0]}',
            '{"time_s": -1, "kind": "lost", "workers": [0]}',
            '{"time_s": true, "kind": "lost", "workers": [0]}',
            '{"time_s": "1", "kind": "lost", "workers": [0]}',
            '{"time_s": 1, "kind": "gone", "workers": [0]}',
            '{"time_s": 1, "kind": ["lost"], "workers": [0]}',
            '{"time_s": 1, "kind": "slow", "workers": [0]}',
            '{"time_s": 1, "kind": "slow", "workers": [0], "speed": 2}',
            '{"time_s": 1, "kind": "lost", "workers": []}',
            '{"time_s": 1, "kind": "lost", "workers": [true]}',
            '{"time_s": 1, "kind": "lost", "workers": 0}',
            '{"time_s": 1, "kind": "lost", "workers": [0], "cause": 7}',
            '{"time_s": 1, "kind": "lost", "workers": [4]}',
            '{"time_s": 1, "kind": "back", "workers": [0]}',
            '{"time_s": 0.5, "kind": "lost", "workers": [0]}',
            '{"time_s": 11, "kind": "lost", "workers": [0]}',
            '{"time_s": 1, "kind": "lost", "workers": [0]} 5',
            '{"time_s": 1, "kind": ',
            "",
            "[1]",
        ],
    )
    def test_a_line_that_cannot_be_read_is_named(self, line: str) -> None:
        good = '{"time_s": 1, "kind": "lost", "workers": [3]}\n'
        last = '{"time_s": 9, "kind": "back", "workers": [3]}\n'
        with refused(ConfigError):
            parse_trace(f"{HEADER}{good}{line}\n{last}")

    @pytest.mark.parametrize(
        "header",
        [
            '{"chameleon_trace": 2, "workers": 4, "duration_s": 10}',
            '{"workers": 4, "duration_s": 10}',
            '{"chameleon_trace": 1, "workers": 0, "duration_s": 10}',
            '{"chameleon_trace": 1, "workers": 1.5, "duration_s": 10}',
            '{"chameleon_trace": 1, "workers": 4, "duration_s": 0}',
            '{"chameleon_trace": 1, "workers": 4, "duration_s": 1, "hosts": 2}',
        ],
    )
    def test_a_first_line_that_cannot_be_read(self, header: str) -> None:
        with refused(ConfigError):
            parse_trace(header)

    def test_it_knows_how_many_hosts_it_is_of(self) -> None:
        assert parse_trace(HEADER, nodes=2).hosts == 2
        with refused(ConfigError):
            parse_trace(HEADER, nodes=3)


class TestInfiniteHbd:
    def test_a_node_is_back_when_all_its_faults_have_ended(self) -> None:
        elements = [start("b", 1), start("b", 2, FAN), end("b", 3), start("a", 3.5), end("b", 4, FAN), end("a", 5)]
        trace = parse_trace(json.dumps(elements))
        assert (trace.workers, trace.duration_s) == (2, 5 * DAY_S)
        assert happenings(trace) == [
            (1 * DAY_S, "lost", (1,)),
            (3.5 * DAY_S, "lost", (0,)),
            (4 * DAY_S, "back", (1,)),
            (5 * DAY_S, "back", (0,)),
        ]
        assert trace.events[0].cause == "GPU: xid"

    def test_two_faults_of_one_kind_need_two_ends(self) -> None:
        trace = parse_trace(json.dumps([start("a", 1), start("a", 2), end("a", 3), start("b", 4)]))
        assert happenings(trace) == [(1 * DAY_S, "lost", (0,)), (4 * DAY_S, "lost", (1,))]

    def test_an_end_of_another_kind_ends_a_fault_of_the_node(self) -> None:
        trace = parse_trace(json.dumps([start("a", 1), end("a", 2, FAN), start("a", 3)]))
        assert [(time_s, kind) for time_s, kind, _ in happenings(trace)] == [
            (1 * DAY_S, "lost"),
            (2 * DAY_S, "back"),
            (3 * DAY_S, "lost"),
        ]

    def test_the_list_may_be_in_any_order(self) -> None:
        elements = [start("a", 1), end("a", 2), start("b", 2), end("b", 4), start("a", 4), end("a", 4.5)]
        assert parse_trace(json.dumps(elements[::-1])) == parse_trace(json.dumps(elements))

    def test_a_fault_shorter_than_the_last_digit_still_takes_the_node(self) -> None:
        trace = parse_trace(json.dumps([start("a", 1), end("a", 1), start("a", 2)]))
        assert happenings(trace)[1] == (1 * DAY_S + RESOLUTION_S, "back", (0,))

    def test_nodes_that_never_failed_are_spread_among_the_failing_ones(self) -> None:
        trace = parse_trace(json.dumps([start(node, 1) for node in "dcba"]), nodes=8)
        assert trace.workers == 8
        assert sorted(worker for event in trace.events for worker in event.workers) == [0, 2, 4, 6]

    @pytest.mark.parametrize(
        "elements",
        [
            [{"node_id": "a"}],
            [{**start("a", 1), "event_type": "fault"}],
            [{**start("a", 1), "event_type": ["fault_end"]}],
            [start("a", -1)],
            [{**start("a", 1), "event_time": "1"}],
            [{**start("a", 1), "event_time": None}],
            [{**start("a", 1), "event_time": 10**400}],
            [{**start("a", 1), "node_id": ""}],
            [start("a", 1, "GPU")],
            [start("a", 1, {"Level": "x", "Class": "GPU"})],
            [end("a", 1)],
            [start("a", 2), end("a", 1)],
            [start("a", 1), start("a", 1)],
            [17],
        ],
    )
    def test_an_element_that_cannot_be_read_is_named(self, elements: Sequence[object]) -> None:
        with refused(ConfigError):
            parse_trace(json.dumps([start("z", 0.5), *elements, start("z", 9)]))

    @pytest.mark.parametrize(
        "text",
        [
            '[\n{"a": 1, "a": 2}]',
            '[\n{"event_time": NaN}]',
            '[\n{"event_time": -Infinity}]',
            '[{"event_time"',
            "[" * 100_000,
            "[]",
            json.dumps([start("a", 0)]),
            json.dumps([start("a", 1)])[:-1],
            json.dumps([start("a", 1)])[:-1] + ",]",
            json.dumps([start("a", 1)]) + " x",
        ],
    )
    def test_a_list_that_is_none(self, text: str) -> None:
        with refused(ConfigError):
            parse_trace(text)

    def test_it_names_at_most_the_existing_nodes(self) -> None:
        with refused(ConfigError):
            parse_trace(json.dumps([start("a", 1), start("b", 2)]), nodes=1)


@st.composite
def memberships(draw: st.DrawFn) -> list[tuple[int, str, str]]:
    """Lines of a log in which nodes of ever new names and of old ones join and leave."""
    there = draw(st.sets(st.sampled_from(["old1", "old2", "old3"])))
    names = {*there, "new1", "new2", "new3", "new4"}
    lines: list[tuple[int, str, str]] = []
    time_ms = 0
    for _ in range(draw(st.integers(1, 20))):
        time_ms += draw(st.sampled_from([0, 0, 1000, 5000]))
        node = draw(st.sampled_from(sorted(names)))
        action = "remove" if node in there else "add"
        there ^= {node}
        lines.append((time_ms, action, node))
    lines.append((time_ms + 1000, "remove" if "old1" in there else "add", "old1"))
    return lines


class TestMembership:
    def test_nodes_take_places(self) -> None:
        log = "0,add,a\n1000,add,b\n2000,remove,a\n3000,remove,b\n5000,add,c\n6000,add,d\n7000,remove,d\n"
        trace = parse_trace(log)
        assert (trace.workers, trace.duration_s) == (2, 7)
        assert happenings(trace) == [
            (0, "lost", (1,)),
            (1, "back", (1,)),
            (2, "lost", (0,)),
            (3, "lost", (1,)),
            (5, "back", (0,)),
            (6, "back", (1,)),
            (7, "lost", (1,)),
        ]

    def test_a_node_that_leaves_first_was_there_from_the_start(self) -> None:
        assert happenings(parse_trace("1000,remove,a\n2000,add,b\n")) == [(1, "lost", (0,)), (2, "back", (0,))]

    def test_a_place_is_not_filled_at_the_moment_it_is_left(self) -> None:
        trace = parse_trace("0,add,a\n1000,remove,a\n1000,add,b\n2000,remove,b\n")
        assert happenings(trace) == [(0, "lost", (1,)), (1, "lost", (0,)), (1, "back", (1,)), (2, "lost", (1,))]

    @given(lines=memberships())
    def test_as_many_are_up_as_the_log_says(self, lines: list[tuple[int, str, str]]) -> None:
        trace = parse_trace("\r\n".join(f"{time_ms}, {action}, {node}" for time_ms, action, node in lines))
        first = {node: action for _, action, node in reversed(lines)}
        for until_ms in range(0, lines[-1][0] + 1, 500):
            up = {node for node, action in first.items() if action == "remove"}
            for time_ms, action, node in lines:
                if time_ms <= until_ms:
                    up = up | {node} if action == "add" else up - {node}
            assert len(live_at(trace, until_ms / 1000)) == len(up)

    def test_the_lines_may_be_in_any_order(self) -> None:
        lines = ["0,add,a", "1000,add,b", "2000,remove,a"]
        assert parse_trace("\n".join(reversed(lines))) == parse_trace("\n\n".join(lines))

    @pytest.mark.parametrize(
        "line",
        [
            "5,add",
            "5,add,b,c",
            "5,kill,b",
            "5,add, ",
            "x,add,b",
            "nan,add,b",
            "inf,add,b",
            "-5,add,b",
            "5,add,a",
            "2500,remove,a",
        ],
    )
    def test_a_line_that_cannot_be_read_is_named(self, line: str) -> None:
        with refused(ConfigError):
            parse_trace(f"0,add,a\n{line}\n2000,remove,a\n")

    def test_a_log_that_does_not_last(self) -> None:
        with refused(ConfigError):
            parse_trace("0,add,a\n0,add,b\n")

    def test_it_names_every_node(self) -> None:
        with refused(ConfigError):
            parse_trace("0,add,a\n1000,remove,a", nodes=3)


class TestWhichFormat:
    @pytest.mark.parametrize("text", ["", " \n", "hello\nworld", "time,action,node\n0,add,a"])
    def test_text_that_is_no_trace(self, text: str) -> None:
        with refused(ConfigError):
            parse_trace(text, source="log.txt")

    @pytest.mark.parametrize("text", [HEADER, "0,add,a\n9,remove,a", json.dumps([start("a", 1)])])
    def test_a_byte_order_mark_and_space_before_do_not_matter(self, text: str) -> None:
        assert parse_trace("\ufeff" + text) == parse_trace(text)

    def test_a_trace_was_measured_on_some_nodes(self) -> None:
        with refused(ConfigError):
            parse_trace(HEADER, nodes=0)

    def test_the_examples_of_the_page_can_be_read(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:json|csv)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert [(trace.workers, len(trace.events)) for trace in map(parse_trace, blocks)] == [(16, 4), (1, 2), (2, 6)]


class TestFiles:
    @pytest.fixture
    def faults(self, tmp_path: Path) -> Path:
        path = tmp_path / "faults.json"
        path.write_text(json.dumps([start("a", 1), start("b", 1), end("a", 2), end("b", 3)]), encoding="utf-8")
        return path

    def test_a_trace_is_written_once_and_read_again(self, tmp_path: Path, faults: Path) -> None:
        trace = load_trace(faults, nodes=5)
        save_trace(trace, tmp_path / "own.jsonl")
        assert load_trace(tmp_path / "own.jsonl") == trace
        with refused(ConfigError):
            save_trace(trace, tmp_path / "own.jsonl")
        with refused(ConfigError):
            save_trace(trace, tmp_path / "nowhere" / "own.jsonl")

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with refused(ConfigError):
            load_trace(tmp_path / "none.json")
        with refused(ConfigError):
            load_trace(tmp_path)
        (tmp_path / "bytes").write_bytes(b"\x80\x81")
        with refused(ConfigError):
            load_trace(tmp_path / "bytes")
        (tmp_path / "bad.csv").write_text("0,add,a\n1,add,a", encoding="utf-8")
        with refused(ConfigError):
            load_trace(tmp_path / "bad.csv")

    @pytest.mark.parametrize(
        ("arguments", "lost"),
        [
            ({"hosts": 2}, [0, 1, 2, 3]),
            ({"hosts": 4}, [0, 1, 4, 5]),  # measured on as many as are asked for
            ({"hosts": 1}, [0, 1]),
            ({"hosts": 2, "nodes": 4}, [0, 1]),  # the first half of them
        ],
    )
    def test_a_trace_for_a_cluster(self, faults: Path, arguments: dict[str, Any], lost: list[int]) -> None:
        trace = load_trace_for(faults, workers_per_host=2, **arguments)
        assert trace.workers == 2 * arguments["hosts"]
        assert sorted(set(range(trace.workers)) - live_at(trace, DAY_S)) == lost

    def test_too_few_hosts_for_a_cluster(self, tmp_path: Path, faults: Path) -> None:
        with refused(ConfigError):
            load_trace_for(faults, hosts=5, workers_per_host=2, nodes=4)
        log = tmp_path / "log.csv"
        log.write_text("0,add,a\n1000,remove,a", encoding="utf-8")
        with refused(ConfigError):
            load_trace_for(log, hosts=2, workers_per_host=2)
