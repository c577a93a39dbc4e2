"""The batch script of a Slurm job."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chameleon_ft.config import DEVICES, RunConfig, config_to_toml
from chameleon_ft.deploy.machines import Machines
from chameleon_ft.deploy.slurm_options import added_options, quoted, time_limit_s
from chameleon_ft.errors import ConfigError

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
_MOST_SIGNAL_S: Final = 65535  # that sbatch takes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """A job with the coordinator in its batch step, and a step with one agent on each node.

    Attributes:
        config: of the run; `output_dir` is its directory.
        python: the interpreter that has Chameleon, on every node.
        time_limit: as `sbatch --time` takes it; None: that of the partition.
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
        if not 1 <= self.checkpoint_s <= _MOST_SIGNAL_S:
            raise ConfigError(f"--checkpoint-s {self.checkpoint_s}: should be 1 or more, and {_MOST_SIGNAL_S} at most")
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
