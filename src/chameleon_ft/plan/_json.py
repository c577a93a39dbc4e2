"""The JSON form of a plan. Importing this module loads pydantic, so only functions that read or write import it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

# JSON has strings as keys. Python refuses to read integers of thousands of digits.
_Worker: TypeAlias = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")]


class PlanDocument(BaseModel):
    """The fields of a plan: ranges are (start, stop), hops (worker, start, stop).

    Recomputed layers are (start, stop) or (start, stop, num_selective). Fields that name no worker are left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["chameleon-plan/1"]
    # A placement has a list as long as its layers, which a typing error in a file must not make endless.
    num_layers: int = Field(le=1_000_000)
    placement: dict[_Worker, list[tuple[int, int]]]
    routes: list[list[tuple[int, int, int]]]
    split_backward: bool
    recompute: dict[_Worker, Annotated[list[int], Field(min_length=2, max_length=3)]] = {}
    fused_workers: list[int] = []
