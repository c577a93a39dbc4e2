"""`chameleon slurm`: submit a run to Slurm."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from chameleon_ft.cli.arguments import parse_start
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.slurm import BatchScript, Machines, with_reachable_host
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import default_directory
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, kw_only=True)
class SlurmArguments:
    """Submit a run to Slurm: a job with the coordinator in its batch step, and one agent on each node.

    A node that fails is a loss like any other. A node that is drained leaves the run by a seamless switch. Before the
    time limit, the run ends with a checkpoint, and the job is requeued and resumes it; the same happens if the node of
    the coordinator is lost. The script and the configuration of the run are written beside the run directory, which
    must be on a file system that all nodes share, as must this installation. See docs/slurm.md.
    """

    config: Annotated[Path | None, "[CONFIG]"] = None
    """TOML file with the configuration; flags override it."""
    workers_per_node: int | None = None
    """Workers of each node, one for each accelerator. Required."""
    nodes: int | None = None
    """Nodes of the job; by default as many as the workers of the run need. Workers beyond those join as newcomers."""
    time: Annotated[str | None, "TIME"] = None
    """Time limit, as sbatch takes it; by default that of the partition."""
    checkpoint_s: int = 120
    """Seconds before the time limit at which the run ends with a checkpoint. Slurm may be a minute early."""
    sbatch: Annotated[tuple[str, ...], "OPTION"] = ()
    """Further option of sbatch, such as --sbatch=--partition=gpu; repeat the flag for several."""
    dry_run: bool = False
    """Print the script; write and submit nothing."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(SlurmArguments, arguments, command="slurm")
    script = _script(given, flags)
    if given.dry_run:
        print(script.text(), end="")
        return 0
    job = script.submit()
    print(f"job {job} is submitted; its output goes to {script.log(job)}")
    print(f"end the run with a checkpoint: scancel --batch --signal=TERM {job}")
    return 0


def _script(given: SlurmArguments, flags: dict[str, Any]) -> BatchScript:
    """Return the script. Raises ConfigError."""
    request = RunRequest(file=given.config, changes=flags)
    config = with_reachable_host(request.config(), chooser="Slurm")
    if given.workers_per_node is None:
        raise ConfigError("--workers-per-node is missing: give the workers of each node, one per accelerator")
    run = (config.output_dir or default_directory(request)).absolute()
    if run.exists():
        # Raises if it is another directory, which a job would refuse.
        RunDirectory.open(run)
    return BatchScript(
        config=config,
        run=run,
        machines=Machines.for_run(config, nodes=given.nodes, workers_per_node=given.workers_per_node),
        python=sys.executable,
        time_limit=given.time,
        checkpoint_s=given.checkpoint_s,
        extra_options=given.sbatch,
        source=None if given.config is None else given.config.absolute(),
    )
