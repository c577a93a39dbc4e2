"""`chameleon slurm`: submit a run to Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from chameleon_ft.cli.arguments import OptionalInt, OptionalStr, Switch, metavar
from chameleon_ft.cli.starting import ConfigFile, configured, parse_start
from chameleon_ft.config import read_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.slurm import WRITTEN_BY, BatchScript, Machines, with_reachable_host
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, kw_only=True)
class SlurmArguments:
    """Submit a run to Slurm: a job with the coordinator in its batch step, and one agent on each node.

    A node that fails is a loss like any other. A node that is drained leaves the run by a seamless switch. Before the
    time limit, the run ends with a checkpoint, and the job is requeued and resumes it; the same happens if the node of
    the coordinator is lost. The script and the configuration of the run are written beside the run directory, which
    must be on a file system that all nodes share, as must this installation. See docs/slurm.md.
    """

    config: ConfigFile = None
    workers_per_node: OptionalInt = None
    """Workers of each node, one for each accelerator. Required."""
    nodes: OptionalInt = None
    """Nodes of the job; by default as many as the workers of the run need. Workers beyond those join as newcomers."""
    time: Annotated[OptionalStr, metavar("TIME")] = None
    """Time limit, as sbatch takes it; by default that of the partition."""
    checkpoint_s: int = 120
    """Seconds before the time limit at which the run ends with a checkpoint. Slurm may be a minute early."""
    sbatch: Annotated[tuple[str, ...], UseAppendAction, metavar("OPTION")] = ()
    """Further option of sbatch, such as --sbatch=--partition=gpu; repeat the flag for several."""
    dry_run: Switch = False
    """Print the script; write and submit nothing."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(SlurmArguments, arguments, command="slurm")
    script = _script(given, flags)
    if given.dry_run:
        print(script.text(), end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch: is not in the PATH; submit from a machine that has Slurm, or give --dry-run")
    try:
        script.run.parent.mkdir(parents=True, exist_ok=True)
        files = {script.config_file: script.config_text(), script.file: script.text()}
        for file in files:
            _require_own(file)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-dir {script.run}: no files can be written beside it: {error}") from None
    submitted = subprocess.run(["sbatch", "--parsable", script.file], capture_output=True, text=True, check=False)
    if submitted.returncode:
        raise ConfigError(f"sbatch refuses {script.file}: {submitted.stderr.strip()}")
    job = submitted.stdout.strip().partition(";")[0]
    print(f"job {job} is submitted; its output goes to {script.log(job)}")
    print(f"end the run with a checkpoint: scancel --batch --signal=TERM {job}")
    return 0


def _require_own(file: Path) -> None:
    """Raise ConfigError if there is a file that this command has not written."""
    if file.exists() and WRITTEN_BY.encode() not in file.read_bytes():
        raise ConfigError(
            f"{file}: exists already, and was not written by `chameleon slurm`; move it away, or give another "
            "--output-dir"
        )


def _script(given: SlurmArguments, flags: dict[str, Any]) -> BatchScript:
    """Return the script. Raises ConfigError."""
    values = {} if given.config is None else read_toml(given.config)
    source = "the configuration" if given.config is None else str(given.config)
    config = with_reachable_host(configured(values, flags, job=None, source=source), chooser="Slurm")
    if given.workers_per_node is None:
        raise ConfigError("--workers-per-node is missing: give the workers of each node, one per accelerator")
    name = "llama" if given.config is None else given.config.stem
    run = (config.output_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if run.exists():
        RunDirectory.open(run)  # raises if it is another directory, which a job would refuse
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
