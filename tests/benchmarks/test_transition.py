"""The references of the benchmark of transitions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks._common import ROOT
from benchmarks._plain_messages import Messages, read_times
from benchmarks._transitions import layer_tensors, min_bytes
from benchmarks.transition import pair_config, regroup_config, several_config
from chameleon_ft.models.llama import num_parameters
from chameleon_ft.plan import LayerRange, Placement

LAYERS = 6


def placed(*ranges: tuple[int, int]) -> Placement:
    return Placement(9, {worker: (LayerRange(*each),) for worker, each in enumerate(ranges)})


def test_the_papers_example_moves_two_layers() -> None:
    old, new = placed((0, 3), (3, 6), (6, 9)), placed((0, 2), (2, 4), (4, 6), (6, 9))
    assert min_bytes(old, new, live=range(4), layer_bytes=[1] * 9) == 2


@st.composite
def placements(draw: st.DrawFn, workers: int = 4) -> Placement:
    held = {}
    for worker in range(draw(st.integers(1, workers))):
        start = draw(st.integers(0, LAYERS - 1))
        held[worker] = (LayerRange(start, draw(st.integers(start + 1, LAYERS))),)
    return Placement(LAYERS, held)


@given(old=placements(), new=placements(), sizes=st.lists(st.integers(1, 50), min_size=LAYERS, max_size=LAYERS))
def test_the_least_is_that_of_all_assignments(old: Placement, new: Placement, sizes: list[int]) -> None:
    live = range(4)

    def missing(worker: int, place: int) -> int:
        had = {layer for layers in old.ranges.get(worker, ()) for layer in layers}
        return sum(sizes[layer] for layer in new.layers_of(place) if layer not in had)

    best = min(sum(map(missing, chosen, new.workers)) for chosen in itertools.permutations(live, len(new.workers)))
    assert min_bytes(old, new, live=live, layer_bytes=sizes) == best


def test_a_layers_state_is_its_parameters_thrice_and_counters() -> None:
    config = pair_config(dim=64)
    tensors = layer_tensors(config)
    assert len(tensors) == config.model.partition_layers
    counters = [size for sizes in tensors for size in sizes if size == 4]
    assert sum(map(sum, tensors)) - 4 * len(counters) == 3 * 4 * num_parameters(config.model)
    assert len(counters) == sum(map(len, tensors)) // 4


def test_messages_are_read_as_they_were_written(tmp_path: Path) -> None:
    rounds = (((0, 1, (5, 6)), (1, 2, (7,))), ((0, 2, (20,)),))
    messages = Messages(ranks=3, rounds=rounds, repeats=2, reuse=True)
    messages.write(tmp_path / "messages.json")
    assert Messages.read(tmp_path / "messages.json") == messages
    assert messages.busiest_bytes == 5 + 6 + 20
    (tmp_path / "times.json").write_text(json.dumps([0.5, 0.25]))
    assert read_times(tmp_path / "times.json") == (0.5, 0.25)


def test_what_fails_is_there_to_fail() -> None:
    profile = ROOT / "profiles" / "llama2-7b-h100-80g.json"
    for config in (pair_config(64), several_config(64), regroup_config("reroute", profile)):
        lost = [failure.worker for failure in config.failures]
        assert len(set(lost)) == len(lost)
        assert max(lost) < config.workers == config.parallel.dp * config.parallel.pp
