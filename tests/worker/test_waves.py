"""Real runs whose workers lack memory for all layers that move to them: they move in waves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chameleon_ft.config import STAND_IN_JOB, Batch, Emulation, Parallel, Recovery, RunConfig
from chameleon_ft.storage.profiles import read_profile, write_profile
from tests.harness import PATIENT, assert_as_the_plain_loop, fails
from tests.histories import train_until

pytestmark = pytest.mark.multiprocess

PROFILE = Path(__file__).parents[2] / "profiles" / "llama2-7b-h100-80g.json"


def test_after_a_loss_layers_move_in_two_waves(tmp_path: Path) -> None:
    # Plans of seven workers fit, and so does the step in force with some of the layers that move, but not with all.
    profile = dataclasses.replace(read_profile(PROFILE), memory_bytes=75 << 30)
    write_profile(profile, tmp_path / "profile.json")
    config = RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=tmp_path / "profile.json",
        workers=8,
        steps=100_000,
        parallel=Parallel(dp=4, pp=2, optimizer_redundancy="all"),
        batch=Batch(micro_batches=32, micro_batch_size=1),
        recovery=Recovery(policy="chameleon", worker_mtbf_hours=1e6),
        emulation=Emulation(time_scale=0.25),
        timeouts=PATIENT,
        failures=(fails(5, step=3),),
    )
    ended = train_until(config, tmp_path / "run", lambda ended: ended.events("join"))
    (join,) = ended.events("join")
    assert (join["waves"], join["stop_s"], join["transfer_s"]) == (2, 0.0, 0.0)
    waves = ended.events("migration")
    assert len(waves) == 2
    assert sum(wave["bytes"] for wave in waves) == join["moved_bytes"]
    assert waves[0]["generation"] < waves[1]["generation"] < join["generation"]
    assert not ended.events("transition")
    assert not ended.events("discarded")
    assert ended.lost == {5}
    assert_as_the_plain_loop(ended)
