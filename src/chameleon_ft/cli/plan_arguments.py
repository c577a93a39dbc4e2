"""The arguments of `chameleon plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from chameleon_ft.cli.arguments import OptionalInt, OptionalPath, Switch, metavar
from chameleon_ft.cli.costs import NO_PRESET, Preset
from chameleon_ft.cli.host_arguments import USUAL_HOSTS, Hosts


@dataclass(frozen=True)
class PlanArguments:
    """Predict a step: its time and that of every operation, the memory of every worker, and lower bounds.

    With CONFIG, for that run, by the profile that it names or --profile; without a profile, its layers are measured
    once on this machine, which takes some seconds. Without CONFIG, for a layout of a published --model on a known
    --device, or of a --profile. The exit code is 1 if the plan does not fit the memory of its workers.
    """

    config: Annotated[OptionalPath, tyro.conf.Positional, metavar("[CONFIG]")] = None
    """TOML file of a run, as for `chameleon train`; or a job, as for `chameleon run`."""
    profile: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]],
        metavar(
            "PATH",
            "Profile of the model of CONFIG; or without CONFIG, instead of --model and --device. Give one profile for "
            "each micro-batch size to choose the best of several sizes.",
        ),
    ] = ()
    preset: Preset = NO_PRESET
    dp: OptionalInt = None
    """Pipelines of the layout."""
    pp: OptionalInt = None
    """Stages of each pipeline."""
    micro_batches: OptionalInt = None
    """Micro-batches of a step, over all pipelines; without CONFIG, 16 for each of --dp if not given."""
    global_batch_size: OptionalInt = None
    """Samples of a step, instead of --micro-batches, which depend on the micro-batch size."""
    split_backward: Switch = False
    """Run the two halves of the backward separately, whatever CONFIG says."""
    hosts: Hosts = USUAL_HOSTS
    snapshots: Annotated[
        Optional[Literal["copy", "parity", "none"]],  # noqa: UP045
        metavar("{copy,parity,none}", "Snapshots whose memory is printed; by default those of CONFIG, or copies."),
    ] = None
    workers: OptionalInt = None
    """Workers to search the best plan for, whatever its pipelines; not with --dp and --pp."""
    planner: Annotated[
        Optional[Literal["layout", "chameleon", "paper", "oobleck"]],  # noqa: UP045
        metavar(
            "{layout,chameleon,paper,oobleck}",
            "layout: equal pipelines, rerouted around failed workers as by --policy reroute; chameleon: the best plan "
            "that a search finds, rerouting included; paper, oobleck: the choice of the published planners, for "
            "comparison. By default the layout, if there is one.",
        ),
    ] = None
    slow: Annotated[str, metavar("WORKER=SPEED[,...]")] = ""
    """Workers that are slower than the others, such as 7=0.6."""
    failed: Annotated[str, metavar("WORKER[,WORKER ...]")] = ""
    """Plan for the loss of these workers."""
    picture: OptionalPath = None
    """Draw the schedule: .svg, .png or .pdf."""
    trace: OptionalPath = None
    """Write the schedule as a trace for ui.perfetto.dev."""
    json: Switch = False
    """Print the prediction as JSON."""
