"""Slow links: how they are measured and noticed, what is assumed of others, and how the coordinator reacts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Health
from chameleon_ft.coordinator.decisions.calibration import Corrections, Ends, LinkTimes, assumed_shares
from chameleon_ft.coordinator.detectors.base import Fenced, Finding, LinksMeasured, RecoveredLink, SlowLink
from chameleon_ft.coordinator.detectors.slowness import SlowLinkDetector, number_of_link, workers_of_link
from chameleon_ft.events.records import JoinRecord
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.protocol.parts import ChannelTimes, OperationTimes
from chameleon_ft.schedule import CostModel, Program, best_program
from chameleon_ft.workload import LayerCost, Workload
from tests.coordinator.histories import History, new_state

LINK = Link(latency_s=0.001, bytes_per_s=1e6)
BYTES = 9000  # of a message: 10 ms in all


def costs(workers: int, hosts: Mapping[int, str] | None = None, inter: Link = LINK) -> CostModel:
    layer = LayerCost(
        name="layer",
        forward_s=0.01,
        input_grad_s=0.01,
        weight_grad_s=0.01,
        param_bytes=10,
        gradient_bytes=10,
        optimizer_bytes=0,
        output_bytes=BYTES,
    )
    on = tuple(Worker(worker, (hosts or {}).get(worker, "a host")) for worker in range(workers))
    return CostModel(Workload((layer,) * workers, 8, 1), Cluster(on, LINK, inter))


def pipeline(model: CostModel) -> Program:
    """One pipeline over all workers, in order."""
    workers = [worker.id for worker in model.cluster.workers]
    plan = data_pipeline_plan(
        layer_costs=[1.0] * len(workers), dp=1, pp=len(workers), micro_batches=8, workers=workers, split_backward=False
    )
    return best_program(plan, model).program


# --- measurement -----------------------------------------------------------------------------------------------------


FORWARD_S = 0.02


def reports(
    delay_s: Callable[[int, int], float], *, offsets: Mapping[int, float], rng: random.Random, waits: bool = True
) -> dict[int, OperationTimes]:
    """Return the reports of three workers in a pipeline about a step, by their own clocks; noise delays messages."""
    found: dict[int, list[ChannelTimes]] = {0: [], 1: [], 2: []}
    for sender, receiver, forward in ((0, 1, True), (1, 2, True), (2, 1, False), (1, 0, False)):
        sent = [10.0 + index for index in range(8)]
        arrived = [at + delay_s(sender, receiver) + rng.choice((0.0, 0.0, 0.5)) for at in sent]
        out = tuple(at + offsets[sender] for at in sent)
        into = tuple(at + offsets[receiver] if waits and rng.random() < 0.8 else 0.0 for at in arrived)
        found[sender].append(ChannelTimes(peer=receiver, forward=forward, sent_s=out))
        found[receiver].append(ChannelTimes(peer=sender, forward=forward, arrived_s=into))
    return {
        worker: OperationTimes(forward_s=FORWARD_S, backward_s=1.0, longest_s=1.0, channels=tuple(channels))
        for worker, channels in found.items()
    }


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), st.integers(0, 1000))
def test_a_link_is_measured_whatever_the_clocks_of_its_workers(clocks: list[float], seed: int) -> None:
    times = LinkTimes()
    model = costs(3)
    times.begin(pipeline(model), model)
    delays = {(0, 1): 0.01, (1, 0): 0.01, (1, 2): 0.03, (2, 1): 0.05}
    found: dict[Ends, tuple[float, int]] = {}
    made = reports(lambda a, b: delays[a, b], offsets=dict(enumerate(clocks)), rng=random.Random(seed))
    for worker, report in made.items():
        found |= times.reported(worker, 7, report)
    assert found[0, 1][0] == pytest.approx(1.0, abs=1e-6)
    assert found[1, 2][0] == pytest.approx(2.5, abs=1e-6)  # 20 ms + 80 ms, instead of 20 ms + 20 ms
    assert times.known == {(0, 1), (1, 2)}
    # 22 of the 40 ms, the forward and the latency, do not depend on its bandwidth.
    assert times.share_of((1, 2), 1 / 2.5) == pytest.approx(18 / 78)
    assert times.share_of((0, 1), 1.0) == 1.0


def test_a_delay_that_is_short_beside_an_operation_counts_for_little() -> None:
    times, model = LinkTimes(), costs(3)
    times.begin(pipeline(model), model)
    made = reports(
        lambda a, b: 0.02 if 2 in (a, b) else 0.01, offsets=dict.fromkeys(range(3), 0.0), rng=random.Random(0)
    )
    found: dict[Ends, tuple[float, int]] = {}
    for worker, report in made.items():
        found |= times.reported(worker, 7, report.model_copy(update={"forward_s": 3.0}))
    assert found[1, 2][0] == pytest.approx(3.04 / 3.02)
    assert times.share_of((1, 2), 3.02 / 3.04) == pytest.approx(18 / 38)


def test_without_a_message_that_was_waited_for_a_link_is_not_measured() -> None:
    times, model = LinkTimes(), costs(3)
    times.begin(pipeline(model), model)
    made = reports(lambda a, b: 0.01, offsets={0: 0.0, 1: 0.0, 2: 0.0}, rng=random.Random(0), waits=False)
    assert [times.reported(worker, 7, report) for worker, report in made.items()] == [{}, {}, {}]


def test_reports_of_different_steps_are_not_mixed() -> None:
    times, model = LinkTimes(), costs(3)
    times.begin(pipeline(model), model)
    made = reports(lambda a, b: 0.01, offsets={0: 0.0, 1: 0.0, 2: 0.0}, rng=random.Random(0))
    assert times.reported(0, 7, made[0]) == {}
    assert times.reported(1, 8, made[1]) == {}
    assert times.reported(0, 7, made[0]) == {}, "too late"
    assert times.reported(0, 8, made[0]).keys() == {(0, 1)}


def test_links_between_hosts_are_of_another_kind() -> None:
    times, model = LinkTimes(), costs(3, {2: "another"}, Link(0.001, 9e3))
    times.begin(pipeline(model), model)
    made = reports(
        lambda a, b: 1.001 if 2 in (a, b) else 0.01, offsets=dict.fromkeys(range(3), 0.0), rng=random.Random(0)
    )
    found: dict[Ends, tuple[float, int]] = {}
    for worker, report in made.items():
        found |= times.reported(worker, 7, report)
    assert {ends: (round(ratio, 6), kind) for ends, (ratio, kind) in found.items()} == {
        (0, 1): (1.0, 0),
        (1, 2): (1.0, 1),
    }


# --- links that were not measured ------------------------------------------------------------------------------------


def test_the_fault_is_assumed_at_the_worker_all_of_whose_links_are_slow() -> None:
    hosts = dict.fromkeys(range(6), "a host")
    slow, measured = {(1, 2): 0.2, (2, 3): 0.25}, {(0, 1), (1, 2), (2, 3), (3, 4)}
    shares = assumed_shares(slow, measured, hosts)
    assert shares == {(0, 2): 0.25, (1, 2): 0.2, (2, 3): 0.25, (2, 4): 0.25, (2, 5): 0.25}
    cluster = Corrections(slow_links=slow, measured_links=frozenset(measured)).applied(costs(6)).cluster
    assert cluster.badly_linked == (2,)
    assert cluster.link(5, 2).bytes_per_s == 0.25 * LINK.bytes_per_s
    assert cluster.link(4, 5) == LINK
    assert cluster.without([2]).ring_all_reduce_s((3, 4, 5), 300) == LINK.ring_all_reduce_s(300, 3)
    slowest = Link(LINK.latency_s, LINK.bytes_per_s * 0.2)
    assert cluster.ring_all_reduce_s((1, 2, 3), 300) == slowest.ring_all_reduce_s(300, 3)


def test_between_hosts_the_fault_is_assumed_at_the_host() -> None:
    hosts = {worker: f"host {worker // 2}" for worker in range(8)}
    slow, measured = {(1, 2): 0.1}, {(0, 1), (1, 2), (2, 3), (5, 6), (4, 5), (3, 4)}
    shares = assumed_shares(slow, measured, hosts)
    # Either at host 0, which has no other link to another host, or at worker 2; worker 3 has a fast one.
    at_host = {ends for ends in combinations(range(8), 2) if ends[0] < 2 <= ends[1]}
    assert shares == dict.fromkeys(at_host | {(2, other) for other in range(4, 8)}, 0.1)


@given(
    st.dictionaries(st.sampled_from([*combinations(range(5), 2)]), st.floats(0.05, 0.9), max_size=4),
    st.sets(st.sampled_from([*combinations(range(5), 2)])),
)
def test_measured_links_are_as_measured(slow: dict[Ends, float], measured: set[Ends]) -> None:
    shares = assumed_shares(slow, measured, {worker: f"host {worker % 2}" for worker in range(5)})
    for ends in measured | slow.keys():
        assert shares.get(ends, 1.0) == slow.get(ends, 1.0)
    assert all(min(slow.values()) <= share < 1 for share in shares.values())


# --- detection -------------------------------------------------------------------------------------------------------


def watch(
    detector: SlowLinkDetector, steps: range, ratios: Callable[[Ends, int], float], links: list[Ends]
) -> tuple[SlowLinkDetector, list[tuple[int, Finding]]]:
    found: list[tuple[int, Finding]] = []
    for step in steps:
        for ends in links:
            signal = LinksMeasured(1, step, {ends: (ratios(ends, step), 0)})
            detector, findings = detector.observe(signal)
            found += [(step, each) for each in findings]
    return detector, found


LINKS = [(worker, worker + 1) for worker in range(8)]


def test_a_slow_link_is_noticed_within_ten_steps_and_so_is_its_recovery() -> None:
    noise = random.Random(1)

    def ratios(ends: Ends, step: int) -> float:
        slow = 4.0 if ends == (3, 4) and 20 <= step < 60 else 1.0
        return slow * noise.lognormvariate(0.0, 0.1)

    detector, found = watch(SlowLinkDetector(), range(100), ratios, LINKS)
    slow = [(step, each) for step, each in found if isinstance(each, SlowLink)]
    assert {each.workers for _, each in slow} == {(3, 4)}
    assert slow[0][0] < 30
    assert slow[0][1].speed == pytest.approx(0.25, rel=0.3)
    assert [(each, step < 72) for step, each in found if isinstance(each, RecoveredLink)] == [
        (RecoveredLink((3, 4), is_trial=False), True)
    ]
    assert detector.speeds == {}


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_slow_network_are_no_slow_links(seed: int) -> None:
    noise = random.Random(seed)
    detector, found = watch(
        SlowLinkDetector(),
        range(200),
        lambda ends, step: (3.0 if step > 100 else 1.0) * noise.lognormvariate(0, 0.3),
        LINKS,
    )
    assert found == []
    assert detector.speeds == {}


def watch_messages(
    counts: Mapping[int, int], *, late_s: float, shape: float, slow: Ends | None = None, seed: int
) -> list[tuple[int, Finding]]:
    """Watch the links of a pipeline of nine workers for 40 steps; messages arrive late by drawn times.

    Args:
        counts: first worker of a link -> messages that are waited for in each direction; of others, 8 are.
        late_s: the mean of these times.
        shape: of their distribution; 1: exponential, more: hardly any message is on time.
        slow: a link whose messages take half as long again from step 20 on.
    """
    model, random_ = costs(9), random.Random(seed)
    times, detector = LinkTimes(), SlowLinkDetector()
    times.begin(pipeline(model), model)
    found: list[tuple[int, Finding]] = []
    for step in range(40):
        channels: dict[int, list[ChannelTimes]] = {worker: [] for worker in range(9)}
        for one, other in LINKS:
            takes_s = 0.015 if (one, other) == slow and step >= 20 else 0.01
            for sender, receiver in ((one, other), (other, one)):
                sent = tuple(1.0 + index for index in range(counts.get(one, 8)))
                arrived = tuple(at + takes_s + random_.gammavariate(shape, late_s / shape) for at in sent)
                forward = sender < receiver
                channels[sender].append(ChannelTimes(peer=receiver, forward=forward, sent_s=sent))
                channels[receiver].append(ChannelTimes(peer=sender, forward=forward, arrived_s=arrived))
        for worker, own in channels.items():
            report = OperationTimes(forward_s=FORWARD_S, backward_s=0.04, longest_s=0.04, channels=tuple(own))
            if links := times.reported(worker, step, report):
                detector, findings = detector.observe(LinksMeasured(1, step, links))
                found += [(step, each) for each in findings]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [1.0, 3.0])
@pytest.mark.parametrize("counts", [{7: 1}, {6: 2, 7: 2}, {2: 1, 5: 1, 6: 2}])
def test_links_of_workers_that_are_often_behind_are_not_slow_because_a_host_is_busy(
    counts: Mapping[int, int], shape: float, seed: int
) -> None:
    assert watch_messages(counts, late_s=0.003, shape=shape, seed=seed) == []


def test_a_slow_link_is_noticed_although_messages_are_late() -> None:
    found = watch_messages({7: 1}, late_s=0.001, shape=1.0, slow=(3, 4), seed=1)
    step, finding = found[0]
    assert isinstance(finding, SlowLink)
    assert (finding.workers, step < 30) == ((3, 4), True)


def test_messages_that_queue_on_a_slow_link_do_not_excuse_it() -> None:
    times, model = LinkTimes(), costs(3, {0: "one", 1: "two", 2: "three"})
    times.begin(pipeline(model), model)
    found: dict[Ends, tuple[float, int]] = {}
    for step in range(2):
        channels: dict[int, list[ChannelTimes]] = {worker: [] for worker in range(3)}
        for sender, receiver in ((0, 1), (1, 0), (1, 2), (2, 1)):
            # Worker 0 sends a message with each forward of the warm-up, and each takes 0.1 s; others find no queue.
            every_s, takes_s = (FORWARD_S if sender == 0 else 1.0), (0.1 if 2 not in (sender, receiver) else 0.01)
            sent = tuple(1.0 + every_s * index for index in range(8))
            arrived = tuple(1.0 + max(every_s, takes_s) * index + takes_s for index in range(8))
            forward = sender < receiver
            channels[sender].append(ChannelTimes(peer=receiver, forward=forward, sent_s=sent))
            channels[receiver].append(ChannelTimes(peer=sender, forward=forward, arrived_s=arrived))
        for worker, own in channels.items():
            report = OperationTimes(forward_s=FORWARD_S, backward_s=0.04, longest_s=0.04, channels=tuple(own))
            found = {**found, **times.reported(worker, step, report)}
    assert {ends: ratio for ends, (ratio, _) in found.items()} == pytest.approx({(0, 1): 0.22 / 0.04, (1, 2): 1.0})


def test_nothing_is_known_of_the_links_of_a_worker_that_is_fenced() -> None:
    detector, found = watch(SlowLinkDetector(), range(20), lambda ends, step: 4.0 if ends == (3, 4) else 1.0, LINKS)
    assert found
    after, findings = detector.observe(Fenced(7))
    assert list(after.speeds) == [number_of_link((3, 4))]
    assert not findings
    after, _ = after.observe(Fenced(4))
    assert after.speeds == {}


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_the_number_of_a_link_is_no_other_ones(one: int, other: int) -> None:
    assert workers_of_link(number_of_link((one, other))) == (one, other)
    assert workers_of_link(one) is None


# --- what the coordinator does about them ----------------------------------------------------------------------------


def trained(speeds: Mapping[Ends, float], *, kind: int = 1, **settings: Health) -> History:
    history = History(new_state(steps=1000, **settings))
    history.link_kind = kind
    history.link_speeds = {(0, 1): 1.0}
    history.train(steps=10)
    go_on(history, speeds)
    return history


def go_on(history: History, speeds: Mapping[Ends, float], steps: int = 10) -> None:
    history.link_speeds = {(0, 1): 1.0, **speeds}
    for _ in range(steps):
        history.commit()
    history.wait(0.1)


def test_a_slow_link_is_reported_decided_on_and_undone() -> None:
    history = trained({(1, 2): 0.5})
    (event,) = history.events("slow_link")
    assert (event["workers"], event["speed"], event["since_step"]) == ((1, 2), 0.5, 10)
    assert event["message"].startswith(
        "micro-batches take 2.00 times as long between workers 1 and 2 as on other links since step 10"
    )
    (asked,) = history.considerations
    assert asked.scale_up.asked_speeds == {number_of_link((1, 2)): 0.5}
    history.consider(0, 2, 3)
    history.switch()
    assert len(history.records(JoinRecord)) == 1
    history.wait(30.0)
    assert not history.considerations, "the plan in force is for this link"


def test_slowness_is_not_looked_for_if_that_is_turned_off() -> None:
    history = trained({(1, 2): 0.5}, health=Health(detect_slow=False))
    assert not history.events("slow_link")
    assert not history.considerations


def test_links_inside_a_host_are_judged_only_on_request_or_if_they_are_emulated() -> None:
    history = trained({(1, 2): 0.5}, kind=0)
    assert not history.events("slow_link")
    assert not history.considerations
    assert trained({(1, 2): 0.5}, kind=0, health=Health(slow_links="all")).events("slow_link")
    emulated = replace(new_state().settings, workers_per_host=4)
    assert emulated.judges_link(is_between_hosts=False)


def test_a_link_that_recovers_is_reported_and_decided_on() -> None:
    history = trained({(1, 2): 0.5})
    history.consider()
    (event,) = history.events("stay")
    assert (event["slow"], event["slow_links"]) == ((), ((1, 2),))
    go_on(history, {})
    (event,) = history.events("recovered_link")
    assert event["message"] == "the link of workers 1 and 2 is as fast as the others again"
    assert len(history.considerations) == 1


def test_the_loss_of_a_worker_with_slow_links_leaves_none() -> None:
    history = trained({(1, 2): 0.5})
    history.consider()
    history.reap(2)
    history.quiesce()
    history.start()
    assert history.state.detectors.speeds == history.state.scale_up.speeds == {}
