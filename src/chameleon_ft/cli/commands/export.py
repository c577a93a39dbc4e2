"""`chameleon export`: the weights of a checkpoint in files of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typing_extensions import Doc

from chameleon_ft.cli.arguments import RunPath, named_checkpoint, parse_arguments
from chameleon_ft.quantities import data_size
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class ExportArguments:
    """Write the weights of a checkpoint into a new folder, by the names that the job's `weights` gives them.

    Without these, tensor NAME of layer N is "layers.N.NAME". The run may be live, or over.
    """

    run: RunPath
    """Run directory."""
    to: Path
    """Folder to write, which appears once it is complete."""
    step: Annotated[
        str | None, "STEP|best", Doc("Export the checkpoint of this step, or the best one; by default the newest.")
    ] = None
    format: Annotated[
        Literal["safetensors", "dcp", "state_dict"],
        Doc(
            "safetensors: model.safetensors, or several files with an index. dcp: a checkpoint of "
            "torch.distributed.checkpoint. state_dict: pytorch_model.bin, for torch.load."
        ),
    ] = "safetensors"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Cast to this type; by default that in which they are trained, which under bf16 is float32."""
    adapters: bool = False
    """Write the adapters alone, as peft reads them."""
    merge: bool = False
    """Write the model with the adapters in it, in place of adapters beside it."""
    average: Annotated[
        str, "KEY", Doc("Write what the optimizer keeps of each parameter under this name instead: ema, its averages.")
    ] = ""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ExportArguments, arguments, command="export")
    run = RunDirectory.open(given.run)
    # Imported here, because --help must not wait for torch.
    from chameleon_ft.session.export import export_weights

    step = named_checkpoint("--step", given.step)
    made = export_weights(
        run,
        given.to,
        step=step,
        form=given.format,
        dtype=given.dtype,
        adapters=given.adapters,
        merge=given.merge,
        average=given.average,
    )
    print(f"step {made.step}: {made.tensors} tensors, {data_size(made.num_bytes)}, in {made.folder}")
    return 0
