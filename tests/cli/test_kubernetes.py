"""Manifests: valid by the schemas of Kubernetes and JobSet, with commands that our own parsers read."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from chameleon_ft.config import TrainConfig, load_config
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.cli.conftest import CommandLine
from tests.golden import message

GIVEN = ["--image", "registry.example/chameleon:1", "--claim", "shared", "--workers-per-node", "2"]
GPUS = ["--device", "cuda", "--backend", "nccl", "--snapshots.every", "0"]
VERSIONS = ("1.31.0", "1.35.0")


def manifests(chameleon: CommandLine, *arguments: str | Path) -> dict[str, dict[str, Any]]:
    """Return the manifests that are printed, by kind and, for several of a kind, name."""
    assert chameleon("kubernetes", *GIVEN, *arguments) == 0, chameleon.capture.readouterr().err
    objects = list(yaml.safe_load_all(chameleon.capture.readouterr().out))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in objects}


def jobs(objects: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the spec of each Job of the JobSet."""
    (job_set,) = (each for each in objects.values() if each["kind"] == "JobSet")
    return {each["name"]: each["template"]["spec"] for each in job_set["spec"]["replicatedJobs"]}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("arguments", [[], ["--nodes", "3"], GPUS], ids=["cpu", "newcomers", "gpu"])
@pytest.mark.parametrize("version", VERSIONS)
def test_they_are_valid_by_the_schemas_of_kubernetes(
    chameleon: CommandLine, arguments: list[str], version: str
) -> None:
    objects = manifests(chameleon, *arguments, "--name", "one")
    assert set(objects) == {
        "ServiceAccount one",
        "Role one",
        "RoleBinding one",
        "ConfigMap one",
        "PodDisruptionBudget one-coordinator",
        "PodDisruptionBudget one-agent",
        "JobSet one",
    }
    for each in objects.values():
        if each["kind"] != "JobSet":
            kubernetes_validate.validate(each, version, strict=True)
    for name, spec in jobs(objects).items():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(job, version, strict=True)


def test_the_job_set_is_valid_by_the_models_of_its_api(chameleon: CommandLine) -> None:
    """The models of Kubeflow's package are generated from the API of JobSet. They drop fields that they do not know."""
    spec = manifests(chameleon, "--name", "one")["JobSet one"]["spec"]
    module = importlib.import_module("kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec")
    assert module.JobsetV1alpha2JobSetSpec.from_dict(spec).to_dict() == spec


def test_our_parsers_read_all_commands(chameleon: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "one", TrainConfig())
    objects = manifests(chameleon, "--name", "one", "--mount", tmp_path, "--steps", "7")
    drained: list[str | None] = []

    def drain(_: RunDirectory, *, workers: tuple[int, ...], host: str | None) -> tuple[int, ...]:
        drained.append(host)
        return workers

    monkeypatch.setattr("chameleon_ft.launch.live_run.drain", drain)
    monkeypatch.setattr("chameleon_ft.launch.live_run.wait_until_out", lambda *_, **__: None)
    config = tmp_path / "run.toml"
    config.write_text(objects["ConfigMap one"]["data"]["run.toml"])
    assert load_config(config).steps == 7
    commands = {name: container(job)["command"] for name, job in jobs(objects).items()}
    hook = container(jobs(objects)["agents"])["lifecycle"]["preStop"]["exec"]["command"]

    def call(command: list[str]) -> int:
        places = {"$(POD_IP)": "127.0.0.2", "$POD_IP": "127.0.0.2", "/etc/chameleon/run.toml": str(config)}
        assert command[0] == "chameleon"
        return chameleon(*(places.get(word, word) for word in command[1:]))

    run.path.rename(tmp_path / "later")
    assert call(commands["coordinator"]) == 0
    assert chameleon.launched[-1].config.control.host == "127.0.0.2"
    assert chameleon.launched[-1].config.control.lease == "kubernetes"
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    assert call(commands["agents"]) == 0
    assert {"workers": 2, "host": "127.0.0.2", "drained_exit_code": 75}.items() <= chameleon.joined[-1].items()
    assert call(commands["standby"]) == 0
    assert chameleon.joined[-1] == {"stands_by_for": run.path, "host": "127.0.0.2"}
    shell, option, script = hook
    assert (shell, option) == ("sh", "-c")
    assert call([word for word in shlex.split(script) if word != "exec"]) == 0
    assert drained == ["127.0.0.2"]


def test_no_secret_is_in_them(chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAMELEON_TOKEN", "a-secret-token")
    objects = manifests(chameleon, "--name", "one")
    assert "a-secret-token" not in str(objects)
    assert not [name for name in objects if name.startswith("Secret")]
    for job in jobs(objects).values():
        (token,) = (each for each in container(job)["env"] if each["name"] == "CHAMELEON_TOKEN")
        assert token["valueFrom"] == {"secretKeyRef": {"name": "one-token", "key": "token"}}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_with_metrics_is_served(chameleon: CommandLine, version: str) -> None:
    objects = manifests(chameleon, "--name", "one", "--monitoring")
    deployment, service, monitor = (objects[f"{kind} one-page"] for kind in ("Deployment", "Service", "ServiceMonitor"))
    kubernetes_validate.validate(deployment, version, strict=True)
    kubernetes_validate.validate(service, version, strict=True)
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (page,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert page["command"] == ["chameleon", "page", "/shared/runs/one", "--listen", f"$(POD_IP):{port['port']}"]
    assert page["ports"] == [{"name": port["targetPort"], "containerPort": port["port"]}]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    for job in jobs(objects).values():
        assert not service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()


def test_what_survives_is_not_restarted(chameleon: CommandLine) -> None:
    objects = manifests(chameleon, "--name", "one", "--nodes", "4")
    assert objects["JobSet one"]["spec"]["failurePolicy"] == {"maxRestarts": 0}
    agents = jobs(objects)["agents"]
    assert agents["completionMode"] == "Indexed"
    assert (agents["completions"], agents["parallelism"]) == (4, 4)
    assert "backoffLimit" not in agents, "the Job fails with none of its pods"
    assert agents["backoffLimitPerIndex"] > 1
    assert all(job["template"]["spec"]["restartPolicy"] == "Never" for job in jobs(objects).values())
    assert [rule["action"] for rule in agents["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    budget = objects["PodDisruptionBudget one-agent"]["spec"]
    assert budget["minAvailable"] == 3
    assert budget["selector"]["matchLabels"].items() <= agents["template"]["metadata"]["labels"].items()


def test_accelerators_are_asked_for(chameleon: CommandLine) -> None:
    gpus = container(jobs(manifests(chameleon, *GPUS))["agents"])["resources"]
    assert gpus == {"limits": {"nvidia.com/gpu": 2}}
    cpus = container(jobs(manifests(chameleon, "--threads", "3"))["agents"])["resources"]
    assert cpus == {"requests": {"cpu": "6"}}
    both = container(jobs(manifests(chameleon, "--resource", "example.com/nic"))["agents"])["resources"]
    assert both == {"requests": {"cpu": "2"}, "limits": {"example.com/nic": 2}}


@pytest.mark.parametrize(
    "flags",
    [
        ("--image", "10.0.0.1:5000/lab/chameleon__ft:1.2-cpu_x@sha256:" + "0f" * 32),
        ("--image", "localhost/chameleon"),
        ("--claim", "1e3", "--token-secret", "a.b-2"),
        ("--resource", "nvidia.com/mig-1g.5gb"),
        ("--resource", "huawei.com/Ascend910"),
    ],
)
def test_names_of_all_forms_are_taken(chameleon: CommandLine, flags: tuple[str, ...]) -> None:
    assert flags[-1] in str(manifests(chameleon, *flags))


def test_the_path_of_the_run_is_passed_on_as_it_is(chameleon: CommandLine) -> None:
    run = "/shared/my run/it's $(POD_IP)"
    specs = jobs(manifests(chameleon, "--output-dir", run))
    shell = container(specs["agents"])["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert shlex.split(shell)[3] == run
    for spec in specs.values():
        assert run.replace("$", "$$") in container(spec)["command"], "Kubernetes replaces no variable"


def test_what_a_parser_in_go_takes_for_something_else_is_in_quotes(chameleon: CommandLine) -> None:
    assert chameleon("kubernetes", *GIVEN, "--name", "y", "--claim", "1e3") == 0
    text = chameleon.capture.readouterr().out
    assert '  name: "y"\n' in text
    assert 'claimName: "1e3"\n' in text


def test_they_are_not_written_over_the_configuration(chameleon: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\n")
    told = chameleon.refused("kubernetes", file, "--file", file, *GIVEN)
    assert "run.toml: is the configuration; give another file" in told
    assert file.read_text() == "steps = 7\n"


def test_they_may_be_written_to_a_file(chameleon: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    assert chameleon("kubernetes", *GIVEN, "--file", file) == 0
    captured = chameleon.capture.readouterr()
    assert captured.out == ""
    assert "kubectl create secret generic llama-token" in captured.err
    assert yaml.safe_load_all(file.read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--name", "One_Run"],
        ["--output-dir", "/other/run"],
        ["--nodes", "1"],
        ["--control.host", "10.0.0.1"],
        ["--grace-s", "0"],
        ["--device", "npu"],
        ["--file", "/nowhere/one.yaml"],
        ["--workers", "5"],
        ["--nodes", "50001"],
        ["--name", ""],
        ["--image", "my image"],
        ["--image", ""],
        ["--image", "registry.example/Chameleon:1"],
        ["--claim", "Shared_1"],
        ["--token-secret", "a/b"],
        ["--resource", "gpu"],
        ["--resource", "kubernetes.io/gpu"],
        ["--mount", "/dev"],
        ["--mount", "/"],
        ["--mount", "/etc/chameleon/x"],
        ["--mount", "/a:b"],
        ["--output-dir", "/shared/../etc/x"],
    ],
)
def test_what_cannot_run_is_refused(chameleon: CommandLine, arguments: list[str]) -> None:
    message(chameleon.refused("kubernetes", *GIVEN, *arguments))


def test_what_is_missing_is_named(chameleon: CommandLine) -> None:
    message(chameleon.refused("kubernetes"))


def test_the_image_has_what_the_manifests_call() -> None:
    """The Dockerfile cannot be built in a test; it installs the package with the versions that are tested."""
    root = Path(__file__).parents[2]
    text = (root / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert copied == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src"}
    assert all((root / name).exists() for name in copied)
    assert "--constraint constraints.txt" in text
