"""The batch script of a Slurm job, with options of sbatch that a user adds, and the machines that it asks for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self

from chameleon_ft.config import DEVICES, MAX_WORKERS, RunConfig, config_to_toml
from chameleon_ft.errors import ConfigError

_UNLIMITED: Final = frozenset({"unlimited", "infinite", "-1"})
_TIME: Final = re.compile(
    r"(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(:(?P<s>\d+))?",
    re.ASCII,
)
_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FLAG: Final = re.compile(r"(--[A-Za-z][-A-Za-z0-9]*|-[A-Za-z])(.*)", re.DOTALL)
_ONE_TASK: Final = "a node has one task, its agent, which starts --workers-per-node workers"
_REMEDIES: Final = {
    "--nodes": "give --nodes N to `chameleon slurm`",
    "--ntasks": _ONE_TASK,
    "--ntasks-per-node": _ONE_TASK,
    "--signal": "give --checkpoint-s to `chameleon slurm`",
    "--output": "it goes to a file beside the run directory; give --output-dir for another place",
    "--array": "all nodes of a run are in one job; submit each run of a series, with an --output-dir of its own",
    "--wrap": "the script of the run is what sbatch submits",
    "--test-only": "give --dry-run to `chameleon slurm`, or run sbatch --test-only with the script",
    "--parsable": "`chameleon slurm` prints the number of the job",
}
_LONG: Final = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "--tasks": "--ntasks",
    "--tasks-per-node": "--ntasks-per-node",
    "-o": "--output",
    "-a": "--array",
}


def added_options(options: tuple[str, ...]) -> list[str]:
    """Return further options of sbatch, each as one word.

    Args:
        options: each with its value, as in --partition=gpu, "--partition gpu", "-p gpu" or -pgpu.

    Raises:
        ConfigError: one is no option, or the script needs it as it is.
    """
    return [_word(option.strip()) for option in options]


def _word(option: str) -> str:
    found = _FLAG.fullmatch(option)
    if found is None or not option.isprintable():
        raise ConfigError(f"--sbatch {option!r}: should be an option of sbatch, such as --sbatch=--partition=gpu")
    flag, rest = found.groups()
    if (remedy := _REMEDIES.get(_LONG.get(flag, flag))) is not None:
        raise ConfigError(f"--sbatch={option}: {remedy}")
    value = rest.strip()
    if re.search(r"\s--[A-Za-z]" if rest.startswith("=") else r"(^|\s)--?[A-Za-z]", value):
        raise ConfigError(f"--sbatch={option}: has several options; give each by a --sbatch of its own")
    if not rest[:1].isspace():
        return option
    return f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}"


def time_limit_s(limit: str) -> float | None:
    """Return the seconds of a time limit; None if it is unlimited. Raises ConfigError if sbatch would not read it."""
    if limit.lower() in _UNLIMITED:
        return None
    if (found := _TIME.fullmatch(limit)) is None:
        raise ConfigError(
            f"--time {limit}: should be MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS, or UNLIMITED"
        )
    seconds = sum(int(text) * _SECONDS[unit[-1]] for unit, text in found.groupdict().items() if text)
    # To sbatch, zero is no limit, too.
    return float(seconds) or None


def quoted(word: str) -> str:
    """Return a word for a line of options: Slurm reads it as a shell does, but for backslashes in quotes."""
    return shlex.quote(word.replace("\\", "\\\\"))


_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines with equally many workers."""

    nodes: int
    workers_per_node: int

    @classmethod
    def for_run(cls, config: RunConfig, *, nodes: int | None, workers_per_node: int) -> Self:
        """Return the machines of a run; those that its workers need if `nodes` is None.

        Raises ConfigError if there are too few or too many. Workers beyond those of the run join it as newcomers.
        """
        for flag, value in (("--workers-per-node", workers_per_node), ("--nodes", nodes)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: should be 1 or more")
        needed = -(-config.workers // workers_per_node)
        if nodes is not None and nodes < needed:
            raise ConfigError(
                f"--nodes {nodes}: the run begins with {config.workers} workers, and {nodes} machines with "
                f"{workers_per_node} each have {nodes * workers_per_node}; take --nodes {needed}, or fewer workers"
            )
        if workers_per_node > MAX_WORKERS or (nodes is not None and nodes * workers_per_node > MAX_WORKERS):
            raise ConfigError(
                f"--workers-per-node {workers_per_node}{'' if nodes is None else f' --nodes {nodes}'}: a run has "
                f"{MAX_WORKERS} workers at most"
            )
        return cls(nodes or needed, workers_per_node)


def with_reachable_host(config: RunConfig, *, chooser: str) -> RunConfig:
    """Return `config` with a `control.host` that holds on any machine, because a scheduler chooses it.

    Args:
        chooser: name of the scheduler, for the message.

    Raises:
        ConfigError: `control.host` is the address of one machine.
    """
    host = config.control.host
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        is_loopback = host == "localhost"
    else:
        is_loopback = address.is_loopback
        if not is_loopback:
            raise ConfigError(
                f'control.host = "{host}": {chooser} chooses the machine of the coordinator; set auto, or the name of '
                "a network interface that all machines have"
            )
    if not is_loopback:
        return config
    return config.model_copy(update={"control": config.control.model_copy(update={"host": _AUTO})})


WRITTEN_BY: Final = "# Written by `chameleon slurm`"
"""Begins a line of each file that a submission writes, and that the next one replaces."""

_TEMPLATE: Final = """\
#!/bin/bash
{written_by}. `sbatch {script}` submits it again: the run then resumes.
{options}

export run={run}
export python={python}
export batch_host=$SLURMD_NODENAME

lead() {{  # runs a coordinator until it has ended; returns its exit code
    "$python" -m chameleon_ft coordinator "$@" &
    coordinator=$!
    while kill -0 "$coordinator" 2>/dev/null; do wait "$coordinator"; done  # a signal ends a wait early
    wait "$coordinator"
}}

is_running() {{  # whether Slurm neither ends nor requeues this job
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]
}}

nodes() {{
    scontrol show hostnames "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)"
}}

serve() {{  # runs the agent of a node
    trap : TERM  # it ends when its agent has, which gets the signal, too
    "$python" -m chameleon_ft agent --run "$run" --workers {workers}
    local code=$?
    # A job with --no-kill outlives its batch step, and is not requeued if the batch host is lost.
    while [ $code -eq 1 ] && is_running; do
        nodes | grep -qxF "$batch_host" || scontrol requeue "$SLURM_JOB_ID"
        sleep {poll_s}
    done
    return $code
}}

release_drained_nodes() {{  # has the workers of a node that is being drained leave, and then gives the node back
    local asked=" " node current
    while sleep {poll_s}; do
        current=$(nodes | paste -sd,)
        [ -n "$current" ] || continue
        for node in $(sinfo --noheader --Node --nodes="$current" --states=drain --format=%N | sort -u); do
            [[ $asked == *" $node "* ]] && continue
            "$python" -m chameleon_ft drain "$run" --host "$node" --wait || continue
            asked+="$node "
            [ "$node" = "$batch_host" ] && continue  # the coordinator stays there
            sleep {poll_s}  # for its agent
            scontrol update JobId="$SLURM_JOB_ID" NodeList="$(nodes | grep -vxF "$node" | paste -sd,)" > /dev/null
            rm -f "slurm_job_${{SLURM_JOB_ID}}_resize."{{sh,csh}}  # which scontrol has written
        done
    done
}}

trap 'kill -TERM "$coordinator" "$watcher" 2>/dev/null' TERM  # the run ends with a checkpoint
release_drained_nodes &
watcher=$!
export -f is_running nodes serve
srun --no-kill --kill-on-bad-exit=0 --wait=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
    --export=ALL bash -c serve &  # a job submitted with --export=NONE would keep the functions from it
agents=$!

lead {config} --output-dir "$run" --resume auto
code=$?
while [ $code -eq 137 ]; do  # killed, such as by the kernel because memory is short; the workers train on
    lead --take-over "$run"
    code=$?
done

kill "$watcher" 2>/dev/null
for _ in {{1..60}}; do kill -0 "$agents" 2>/dev/null && sleep 0.5; done  # the agents end their workers
[ $code -eq 75 ] && is_running && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""
_POLL_S: Final = 10.0
# sbatch takes no more.
_MAX_SIGNAL_S: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """A job with the coordinator in its batch step, and a step with one agent on each node.

    Attributes:
        config: The configuration; `output_dir` is the run directory.
        python: the interpreter that has Chameleon, on every node.
        time_limit: What `sbatch --time` takes; None: that of the partition.
        checkpoint_s: seconds before the time limit at which the run ends with a checkpoint and the job is requeued.
        extra_options: further options of sbatch.
        poll_s: seconds between two looks at the states of the nodes.
        source: file of the user with the configuration, which is left as it is.

    Raises:
        ConfigError: sbatch would not take an option, the script needs one as it is, or the job would have no time.
    """

    config: RunConfig
    run: Path
    machines: Machines
    python: str
    time_limit: str | None = None
    checkpoint_s: int = 120
    extra_options: tuple[str, ...] = ()
    poll_s: float = _POLL_S
    source: Path | None = None

    def __post_init__(self) -> None:
        if not str(self.run).isprintable():
            raise ConfigError(f"--output-dir {str(self.run)!r}: should have no control characters")
        if not 1 <= self.checkpoint_s <= _MAX_SIGNAL_S:
            raise ConfigError(f"--checkpoint-s {self.checkpoint_s}: should be 1 or more, and {_MAX_SIGNAL_S} at most")
        added_options(self.extra_options)
        limit_s = None if self.time_limit is None else time_limit_s(self.time_limit)
        if limit_s is not None and limit_s <= self.checkpoint_s:
            raise ConfigError(
                f"--time {self.time_limit}: leaves no time to train, because the run ends with a checkpoint "
                f"{self.checkpoint_s} s before that; give more time, or less by --checkpoint-s"
            )

    @property
    def file(self) -> Path:
        """Where the script is, beside the run directory."""
        return self.run.with_name(f"{self.run.name}.sbatch")

    @property
    def config_file(self) -> Path:
        """Where the configuration with all values is that the script names."""
        file = self.run.with_name(f"{self.run.name}.toml")
        is_source = self.source is not None and os.path.realpath(self.source) == os.path.realpath(file)
        return self.run.with_name(f"{self.run.name}.submitted.toml") if is_source else file

    def config_text(self) -> str:
        """Return the content of `config_file`."""
        return f"{WRITTEN_BY}, which replaces it when the run is submitted again.\n{config_to_toml(self.config)}"

    def log(self, job: str) -> Path:
        """Return where Slurm writes the output of the job of that number."""
        return self.run.with_name(f"{self.run.name}-{job}.log")

    def text(self) -> str:
        """Return the script."""
        return _TEMPLATE.format(
            written_by=WRITTEN_BY,
            script=shlex.quote(str(self.file)),
            options="\n".join(f"#SBATCH {option}" for option in self._options()),
            run=shlex.quote(str(self.run)),
            python=shlex.quote(self.python),
            poll_s=f"{self.poll_s:g}",
            workers=self.machines.workers_per_node,
            config=shlex.quote(str(self.config_file)),
        )

    def submit(self) -> str:
        """Write the script and the configuration, and return the number of the job. Raises ConfigError."""
        if shutil.which("sbatch") is None:
            raise ConfigError("sbatch: is not in the PATH; submit from a machine that has Slurm, or give --dry-run")
        files = {self.config_file: self.config_text(), self.file: self.text()}
        try:
            self.run.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                if file.exists() and WRITTEN_BY.encode() not in file.read_bytes():
                    raise ConfigError(
                        f"{file}: exists already, and was not written by `chameleon slurm`; move it away, or give "
                        "another --output-dir"
                    )
            for file, text in files.items():
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output-dir {self.run}: no files can be written beside it: {error}") from None
        submitted = subprocess.run(["sbatch", "--parsable", self.file], capture_output=True, text=True, check=False)
        if submitted.returncode:
            raise ConfigError(f"sbatch refuses {self.file}: {submitted.stderr.strip()}")
        return submitted.stdout.strip().partition(";")[0]

    def _options(self) -> list[str]:
        workers = self.machines.workers_per_node
        options = [
            f"--job-name={self.run.name}",
            f"--nodes={self.machines.nodes}",
            "--ntasks-per-node=1",
            "--no-kill",
            "--requeue",
            "--open-mode=append",
            f"--output={str(self.run).replace('%', '%%')}-%j.log",
            f"--signal=B:TERM@{self.checkpoint_s}",
        ]
        if self.config.device == "cuda":
            options.append(f"--gpus-per-node={workers}")
        elif not DEVICES[self.config.device].is_accelerator:
            options.append(f"--cpus-per-task={workers * self.config.threads}")
        if self.time_limit is not None:
            options.append(f"--time={self.time_limit}")
        return [quoted(option) for option in (*options, *added_options(self.extra_options))]
