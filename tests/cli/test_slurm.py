"""Submitted Slurm jobs and their batch script, which bash runs with stand-ins for the commands that it calls.

A real Slurm runs it in tests/launch/test_slurm_cluster.py.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, TrainConfig, config_to_toml, load_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.slurm import BatchScript, Machines, time_limit_s
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.cli.conftest import CommandLine
from tests.golden import message, refused

# Each writes down how it was called. The coordinator ends with the next code of the file `codes`, or waits for SIGTERM.
PYTHON = """\
#!/bin/bash
cd {directory}
echo "chameleon$(printf ' %q' "${{@:3}}")" >> calls
[ "$3" = agent ] && exit "$(cat agent)"
[ "$3" = coordinator ] || exit 0
code=$(head -n 1 codes); sed -i 1d codes
[ "$code" = waits ] || exit "$code"
trap 'exit 75' TERM
echo ready >> calls
while :; do sleep 0.02; done
"""
SLURM = {
    "srun": """echo "srun$(printf ' %q' "$@")" >> calls; bash -c "${@: -1}" """,
    "squeue": '[[ $* == *%T* ]] && cat state || echo "n[1-3]"',
    "sinfo": "cat draining",
    "scontrol": """
[ "$1" = show ] && exec cat nodes
echo "scontrol $*" >> calls
[ "$1" = requeue ] && echo COMPLETING > state
exit 0""",
}


@dataclass
class Job:
    """The script of a run of six workers on three nodes, and what it has called."""

    directory: Path
    script: BatchScript

    def start(
        self,
        *codes: int | str,
        state: str = "RUNNING",
        draining: str = "",
        agent: int = 0,
        nodes: Sequence[str] = ("n1", "n2", "n3"),
    ) -> subprocess.Popen[str]:
        """Start the script, whose coordinators end with `codes`, one after the other.

        Args:
            agent: exit code of the agent.
            nodes: those that the job has left.
        """
        files = {"codes": codes, "state": [state], "draining": [draining], "agent": [agent], "nodes": nodes}
        for name, lines in files.items():
            (self.directory / name).write_text("".join(f"{line}\n" for line in lines if line != ""))
        (self.directory / "calls").touch()
        self.script.file.write_text(self.script.text())
        path = f"{self.directory}:/usr/bin:/bin"
        environ = {"PATH": path, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "2"}
        return subprocess.Popen(["bash", self.script.file], env=environ, text=True)

    def calls(self, command: str = "") -> list[str]:
        return [line for line in (self.directory / "calls").read_text().splitlines() if line.startswith(command)]

    def wait_for(self, is_called: Callable[[list[str]], object]) -> None:
        while not is_called(self.calls()):
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    stubs = {"python": PYTHON.format(directory=tmp_path), **SLURM}
    for name, text in stubs.items():
        file = tmp_path / name
        file.write_text(text if text.startswith("#!") else f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        file.chmod(0o755)
    config = TrainConfig(workers=6, parallel=Parallel(dp=3, pp=2), batch=Batch(micro_batches=6))
    script = BatchScript(
        config=config,
        run=tmp_path / "a run",
        machines=Machines(3, 2),
        python=str(tmp_path / "python"),
        time_limit="4:00:00",
        extra_options=("--partition=gpu", "--comment=a b"),
        poll_s=0.02,
    )
    return Job(tmp_path, script)


def test_slurm_is_asked_for_what_the_run_needs(job: Job) -> None:
    lines = job.script.text().splitlines()
    options = [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    run = job.script.run
    assert options == [
        "--job-name=a run",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        f"--output={run}-%j.log",
        "--signal=B:TERM@120",
        "--cpus-per-task=2",
        "--time=4:00:00",
        "--partition=gpu",
        "--comment=a b",
    ]
    assert all(line.startswith("#") for line in lines[: 2 + len(options)]), "options after a command are not read"


def test_a_run_that_ends_ends_the_job(job: Job, chameleon: CommandLine) -> None:
    with job.start(0) as script:
        assert script.wait() == 0
    assert not job.calls("scontrol")
    run = job.script.run
    (step,) = map(shlex.split, job.calls("srun"))
    assert step[1:5] == ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=2"]
    # The parsers of the commands read the flags.
    job.script.config_file.write_text(config_to_toml(job.script.config))
    (coordinator,) = job.calls("chameleon coordinator")
    launched = chameleon.configured(*shlex.split(coordinator)[1:])
    assert (launched.output_dir, launched.workers) == (run, 6)
    RunDirectory(run).write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    (agent,) = job.calls("chameleon agent")
    assert chameleon(*shlex.split(agent)[1:]) == 0
    assert chameleon.joined[0]["workers"] == 2


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("COMPLETING", False)])
def test_the_signal_before_the_time_limit_ends_the_run_and_requeues_the_job(
    job: Job, state: str, requeued: bool
) -> None:
    """A job that is cancelled gets SIGTERM, too, and is not running any more."""
    with job.start("waits", state=state) as script:
        job.wait_for(lambda calls: "ready" in calls)
        script.send_signal(signal.SIGTERM)
        assert script.wait() == 75
    assert job.calls("scontrol") == (["scontrol requeue 7"] if requeued else [])


def test_a_coordinator_that_is_killed_is_replaced(job: Job) -> None:
    with job.start(137, 137, 0) as script:
        assert script.wait() == 0
    first, *others = map(shlex.split, job.calls("chameleon coordinator"))
    assert first[-2:] == ["--resume", "auto"]
    assert others == [["chameleon", "coordinator", "--take-over", str(job.script.run)]] * 2


@pytest.mark.parametrize(
    ("agent", "nodes", "requeued"),
    [(1, ["n2", "n3"], True), (1, ["n1", "n2", "n3"], False), (75, ["n2", "n3"], False)],
    ids=["lost", "there", "resumes"],
)
def test_the_loss_of_the_coordinators_node_requeues_the_job(
    job: Job, agent: int, nodes: list[str], requeued: bool
) -> None:
    """Here the script goes on, which does not change what agents see."""
    with job.start("waits", agent=agent, nodes=nodes) as script:
        job.wait_for(lambda calls: "ready" in calls and any(call.startswith("chameleon agent") for call in calls))
        if requeued:
            job.wait_for(lambda calls: "scontrol requeue 7" in calls)
        (job.directory / "state").write_text("COMPLETING\n")
        script.send_signal(signal.SIGTERM)
        assert script.wait() == 75
    assert job.calls("scontrol") == (["scontrol requeue 7"] if requeued else [])


def test_a_run_that_fails_fails_the_job(job: Job) -> None:
    with job.start(1) as script:
        assert script.wait() == 1
    assert not job.calls("scontrol")


@pytest.mark.parametrize(("node", "stays"), [("n2", False), ("n1", True)])
def test_a_node_that_is_drained_leaves_the_run_and_then_the_job(job: Job, node: str, stays: bool) -> None:
    with job.start("waits", draining=node) as script:
        done = "chameleon drain" if stays else "scontrol update JobId=7 NodeList=n1,n3"
        job.wait_for(lambda calls: any(call.startswith(done) for call in calls))
        script.send_signal(signal.SIGTERM)
        assert script.wait() == 75
    (drain,) = map(shlex.split, job.calls("chameleon drain"))
    assert drain == ["chameleon", "drain", str(job.script.run), "--host", node, "--wait"]
    assert bool(job.calls("scontrol update")) != stays, "the coordinator is on the batch host"


@pytest.mark.parametrize("file", ["script", "configuration"])
def test_what_is_submitted_lies_beside_the_run(
    chameleon: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\necho "$*" > {tmp_path}/submitted\necho "7;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    given = ["--workers-per-node", "2", "--steps", "7", "--output-dir", "runs/one", "--sbatch=--partition=gpu"]
    assert chameleon("slurm", *given) == 0
    run = tmp_path / "runs" / "one"
    assert chameleon.capture.readouterr().out.startswith(f"job 7 is submitted; its output goes to {run}-7.log\n")
    if file == "script":
        assert (tmp_path / "submitted").read_text() == f"--parsable {run}.sbatch\n"
        text = (tmp_path / "runs" / "one.sbatch").read_text()
        assert "#SBATCH --nodes=2\n" in text
        assert "#SBATCH --partition=gpu\n" in text
    else:
        config = load_config(tmp_path / "runs" / "one.toml")
        assert (config.steps, config.control.host) == (7, "auto")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--partition gpu", "--partition=gpu"),
        ("-p  gpu", "-pgpu"),
        ("-pgpu", "-pgpu"),
        ("--exclusive", "--exclusive"),
        ("--nice -100", "--nice=-100"),
        ('--comment=it\'s a # \\ "test"', '--comment=it\'s a # \\ "test"'),
        ("--time=1", "--time=1"),
    ],
)
def test_options_are_taken_in_all_forms(job: Job, option: str, expected: str) -> None:
    script = replace(job.script, extra_options=(option,))
    lines = [line for line in script.text().splitlines() if line.startswith("#SBATCH ")]
    assert read_by_slurm(lines[-1]) == [expected]


def read_by_slurm(line: str) -> list[str]:
    """Return the words of a line of options as sbatch splits it: a backslash is an escape also in single quotes."""
    lexer = shlex.shlex(line.removeprefix("#SBATCH"), posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.escapedquotes = True, "\"'"
    return list(lexer)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("2-12:30:15", 217_815),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_time_limits_are_taken_as_sbatch_takes_them(limit: str, seconds: float | None) -> None:
    assert time_limit_s(limit) == seconds


@pytest.mark.parametrize("limit", ["", "1h", "1:2:3:4", "-5", "1.5", "2-", "1-2:3:4:5", "½"])
def test_what_is_no_time_limit(limit: str) -> None:
    with refused(ConfigError):
        time_limit_s(limit)


def test_a_path_with_a_percent_sign_is_no_pattern_of_slurm(job: Job) -> None:
    script = replace(job.script, run=job.directory / "100%j")
    assert f"--output={job.directory}/100%%j-%j.log" in script.text()
    assert script.log("7").name == "100%j-7.log"


@pytest.mark.parametrize("source", ["one.toml", "there/one.toml"])
def test_the_configuration_of_the_user_is_not_written_over(chameleon: CommandLine, tmp_path: Path, source: str) -> None:
    (tmp_path / "one.toml").write_text("steps = 7  # a remark\n")
    (tmp_path / "there").symlink_to(tmp_path)
    given = (source, "--workers-per-node", "4", "--output-dir", "one", "--dry-run")
    assert chameleon("slurm", *given) == 0
    assert f"lead {tmp_path}/one.submitted.toml --output-dir" in chameleon.capture.readouterr().out


@pytest.mark.parametrize("name", ["one.toml", "one.sbatch"])
def test_files_of_the_user_are_not_written_over(
    chameleon: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    given = ("slurm", "--workers-per-node", "4", "--output-dir", "one")
    assert chameleon(*given) == chameleon(*given) == 0, "files of an earlier submission are replaced"
    kept = tmp_path / name
    kept.write_text("# of the user\n")
    before = {file: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    assert f"{name}: exists already, and was not written by `chameleon slurm`" in chameleon.refused(*given)
    assert {file: file.read_text() for file in tmp_path.iterdir() if file.is_file()} == before


def test_a_dry_run_prints_the_script_and_writes_nothing(chameleon: CommandLine, tmp_path: Path) -> None:
    assert chameleon("slurm", "--workers-per-node", "4", "--output-dir", "one", "--dry-run") == 0
    assert chameleon.capture.readouterr().out.startswith("#!/bin/bash\n")
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("one")]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--workers-per-node", "2", "--nodes", "1"],
        ["--workers-per-node", "2", "--control.host", "10.0.0.1"],
        ["--workers-per-node", "2", "--checkpoint-s", "0"],
        ["--workers-per-node", "2", "--checkpoint-s", "65536"],
        ["--workers-per-node", "2", "--time", "tomorrow"],
        ["--workers-per-node", "2", "--time", "2"],
        ["--workers-per-node", "2", "--output-dir", "a\nb"],
        ["--workers-per-node", "2", "--sbatch=partition=gpu"],
        ["--workers-per-node", "2", "--sbatch=--comment=a\nb"],
        ["--workers-per-node", "2", "--sbatch=--gres=gpu:8 --mem=0"],
        ["--workers-per-node", "2", "--sbatch=-p gpu -A lab"],
        ["--workers-per-node", "2", "--sbatch=--array=0-3"],
        ["--workers-per-node", "2", "--sbatch=-a0-3"],
        ["--workers-per-node", "2", "--sbatch=--ntasks-per-node 8"],
        ["--workers-per-node", "2", "--sbatch=-N 4"],
        ["--workers-per-node", "2", "--workers", "5"],
        ["--workers-per-node", "2", "--output-dir", "/etc"],
        ["--workers-per-node", "2"],
    ],
)
def test_what_cannot_be_submitted_is_refused(
    chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    message(chameleon.refused("slurm", *arguments))


def test_what_sbatch_says_is_passed_on(chameleon: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'error: invalid partition specified: gpu' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    error = chameleon.refused("slurm", "--workers-per-node", "4", "--output-dir", "one")
    assert f"sbatch refuses {tmp_path}/one.sbatch: error: invalid partition specified: gpu" in error
