"""`chameleon profile`: derived, measured, between hosts, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chameleon_ft.config import load_config
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.storage.profiles import read_profile
from chameleon_ft.worker.inspection import inspect_job
from tests.cli.conftest import OWN_MODEL, CommandLine
from tests.golden import message
from tests.harness import Command, every_process_ends
from tests.network import ADDRESSES, Network


@pytest.fixture
def own_model(own_model: Path) -> Path:
    """A job with a configuration beside it."""
    own_model.with_suffix(".toml").write_text(
        "workers = 2\nthreads = 1\n[parallel]\ndp = 2\npp = 1\n[batch]\nmicro_batches = 2\nmicro_batch_size = 3\n"
    )
    return own_model


@dataclass(frozen=True)
class Hosts:
    """Two hosts: their network namespaces, and where the second one answers."""

    first: str | None
    second: str | None
    address: str


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Return two network namespaces of this machine, or where none can be made, the machine itself, twice."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(f"profile-{os.getpid()}"))
        except (subprocess.CalledProcessError, FileNotFoundError):
            yield Hosts(None, None, "127.0.0.1:0")
        else:
            yield Hosts(network.name("first"), network.name("second"), f"{ADDRESSES['second']}:29400")


def test_a_published_model_on_a_known_device(chameleon: CommandLine) -> None:
    assert chameleon("profile", "--model", "llama3-8b", "--device", "h100-80g", "--out", "p.json") == 0
    assert read_profile(Path("p.json")) == derived_profile(
        model_shape("llama3-8b"), device("h100-80g"), micro_batch_size=1
    )
    printed = chameleon.capture.readouterr().out
    assert "block 1 to" in printed, "layers of a kind are one row"
    assert "block 2" not in printed
    assert "written to p.json" in printed
    assert "0 s beside its layers" in printed
    assert "80.0 GB" in printed


def test_a_model_by_its_hugging_face_file_printed_as_json(chameleon: CommandLine) -> None:
    Path("config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "intermediate_size": 96,
                "vocab_size": 100,
                "max_position_embeddings": 32,
            }
        )
    )
    assert (
        chameleon(
            *("profile", "--model", "config.json", "--device", "a100-80g", "--micro-batch-size", "4"),
            *("--recompute", "full", "--out", "p.json", "--json"),
        )
        == 0
    )
    assert chameleon.capture.readouterr().out == Path("p.json").read_text()
    profile = read_profile(Path("p.json"))
    assert (len(profile.layers), profile.fingerprint.micro_batch_size) == (5, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--model", "llama2-7", "--device", "h100-80g"),
        ("--model", "llama2-7b", "--device", "h100-81g"),
        ("--model", "llama2-7b"),
        ("--model", "llama2-7b", "--device", "h100-80g", "--state", "int4"),
        ("--model", "llama2-7b", "--device", "h100-80g", "--peer", "a:1"),
        ("mine.py", "--model", "llama2-7b", "--device", "h100-80g"),
        ("mine.py", "--device", "h100-80g"),
        ("mine.py", "--micro-batch-size", "1,2"),
        ("--model", "llama2-7b", "--device", "h100-80g", "--micro-batch-size", "auto"),
        ("mine.py", "--recompute", "full"),
        ("--model", "llama2-7b", "--device", "h100", "--micro-batch-size", "0"),
        ("--serve", "127.0.0.1:1", "--state", "bf16"),
        ("mine.py", "--repeats", "0"),
        ("mine.py", "--serve", "127.0.0.1:1"),
        ("missing.toml",),
        ("--model", "llama2-7b", "--device", "h100-80g", "--job.lr", "1"),
        ("mine.py", "--job.lr", "1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: tuple[str, ...], chameleon: CommandLine, own_model: Path
) -> None:
    out = () if "--serve" in arguments else ("--out", "p.json")
    message(chameleon.refused("profile", *arguments, *out))
    assert not Path("p.json").exists()


@pytest.mark.parametrize("out", ["there.json", "no/such/p.json"])
def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    out: str, chameleon: CommandLine, own_model: Path
) -> None:
    Path("there.json").write_text("precious")
    # A job that fails as soon as it is loaded: it is not.
    own_model.write_text("raise RuntimeError")
    message(chameleon.refused("profile", own_model, "--out", out))
    assert Path("there.json").read_text() == "precious"


def test_a_profile_without_a_place_is_refused(chameleon: CommandLine, own_model: Path) -> None:
    message(chameleon.refused("profile", own_model))


def test_a_job_that_cannot_be_trained_says_why(chameleon: CommandLine, own_model: Path) -> None:
    own_model.write_text(OWN_MODEL.replace("nn.Linear, 4, 4)] * 3", "nn.Linear, 5, 4)] * 3"))
    said = chameleon.refused("profile", own_model, "--out", "p.json")
    assert "layer 0 (Linear) cannot be run" in said


@pytest.mark.parametrize("command", [("profile", "--out", "p.json"), ("plan",)])
def test_arguments_of_the_job_are_flags(chameleon: CommandLine, own_model: Path, command: tuple[str, ...]) -> None:
    own_model.write_text(OWN_MODEL.replace("def job():", "def job(*, width: int = 4):").replace("4, 4)]", "width, 4)]"))
    said = chameleon.refused(*command, own_model, "--job.width", "5")
    assert "layer 0 (Linear) cannot be run" in said


def test_layers_that_fail_when_they_are_run_are_the_users_to_mend(chameleon: CommandLine, own_model: Path) -> None:
    # On the meta device an index is not looked at.
    text = OWN_MODEL.replace("partial(nn.Linear, 4, 4)] * 3", "partial(nn.Embedding, 3, 4), partial(nn.Linear, 4, 4)]")
    own_model.write_text(text.replace("(torch.zeros(4), torch", "(torch.tensor(7), torch"))
    said = chameleon.refused("profile", own_model, "--out", "p.json")
    assert "layer 0 (Embedding) cannot be run" in said
    assert "IndexError: index out of range" in said


@pytest.mark.multiprocess
def test_a_job_is_measured_and_the_link_to_another_host(own_model: Path, tmp_path: Path, hosts: Hosts) -> None:
    out = tmp_path / "p.json"
    secret = {"CHAMELEON_TOKEN": "secret"}
    with Command("profile", "--serve", hosts.address, environ=secret, network=hosts.second) as server:
        address = server.read_until(r"answering on (\S+:\d+);")[1]
        arguments = ("profile", own_model, "--repeats", "3", "--peer", address, "--micro-batch-size", "2", "--out", out)
        with Command(*arguments, environ=secret, network=hosts.first) as measuring:
            assert measuring.wait() == 0, measuring.printed
        server.read_until(r"\S+ has measured the link to here")
        with every_process_ends(server.session()):
            server.signal(signal.SIGINT)
            assert server.wait() == 130
    profile = read_profile(out)
    config = load_config(own_model.with_suffix(".toml"))
    batch = config.batch.model_copy(update={"micro_batch_size": 2})
    config = config.model_copy(update={"job": str(own_model), "batch": batch})
    profile.require({"model": inspect_job(config).fingerprint, "micro_batch_size": 2, "dtype": "float32", "threads": 1})
    assert profile.source == "measured"
    assert len(profile.layers) == len(profile.times) == 3
    assert [layer.param_bytes for layer in profile.layers] == [80] * 3
    assert profile.inter_host is not None
    assert {reduce.workers for reduce in profile.all_reduces} == {2}
    assert f"--repeats 3 --peer {address}" in profile.provenance
    assert profile.provenance in " ".join(measuring.printed.split("\n"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_what_ends_it_leaves_no_process_and_no_file(
    number: signal.Signals, code: int, own_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    with Command("profile", own_model, "--repeats", "1500", "--out", out) as measuring:
        while len(processes := measuring.session()) < 4:  # itself, the fork server, those that measure
            assert any(process.pid == measuring.pid for process in processes), "it is through already"
            time.sleep(0.05)
        with every_process_ends(processes):
            if number == signal.SIGINT:
                measuring.interrupt_all()
            else:
                measuring.signal(number)
            assert measuring.wait() == code
    assert "Traceback" not in measuring.printed
    assert not out.exists()
