"""The JSON form of a plan, checked field by field before any plan type is built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.errors import PlanError

FORMAT: Final = "chameleon-plan/1"
# Of a worker id: more would be no id, and Python refuses to read thousands of them.
_MOST_DIGITS: Final = 18
# No model has as many; a placement has a list as long as its layers, which a slip of the pen must not make endless.
_MOST_LAYERS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The numbers of a plan: ranges are (start, stop), hops are (worker, start, stop), routes in micro-batch order.

    `recompute` has (start, stop), or (start, stop, num_selective); it is left out of a file if no worker recomputes.
    Older files list the workers that recompute all that they hold; here such a worker has None. `fused_workers` is
    left out if there are none.
    """

    num_layers: int
    ranges: dict[int, list[tuple[int, int]]]
    routes: list[list[tuple[int, int, int]]]
    split_backward: bool
    recompute: Mapping[int, tuple[int, ...] | None] = field(default_factory=dict)
    fused_workers: Sequence[int] = ()


def dump(record: PlanRecord) -> str:
    fields = {
        "format": FORMAT,
        "num_layers": record.num_layers,
        "placement": {str(worker): ranges for worker, ranges in record.ranges.items()},
        "routes": record.routes,
        "split_backward": record.split_backward,
    }
    if record.recompute:
        fields["recompute"] = {str(worker): layers for worker, layers in record.recompute.items()}
    if record.fused_workers:
        fields["fused_workers"] = record.fused_workers
    return json.dumps(fields, separators=(",", ":"))


def load(text: str) -> PlanRecord:
    """Raises PlanError, with the place of the fault, when `text` is not a plan."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"a plan must be JSON: {error}") from error
    fields = _object(document, "a plan")
    if (found := fields.get("format")) != FORMAT:
        raise PlanError(f'a plan must have "format" {FORMAT!r}; got {found!r}')
    expected = {"format", "num_layers", "placement", "routes", "split_backward"}
    if fields.keys() - {"recompute", "fused_workers"} != expected:
        raise PlanError(f"a plan must have the fields {sorted(expected)}; got {sorted(fields)}")
    split_backward = fields["split_backward"]
    if not isinstance(split_backward, bool):
        raise PlanError(f"split_backward of a plan must be true or false; got {split_backward!r}")
    ranges: dict[int, list[tuple[int, int]]] = {}
    for worker, value in _by_worker(fields["placement"], "the placement of a plan").items():
        where = f"the ranges of worker {worker}"
        ranges[worker] = [_pair(pair, where) for pair in _list(value, where)]
    routes: list[list[tuple[int, int, int]]] = []
    for index, value in enumerate(_list(fields["routes"], "the routes of a plan")):
        where = f"the route of micro-batch {index}"
        hops = [_integers(hop, 3, where) for hop in _list(value, where)]
        routes.append([(worker, start, stop) for worker, start, stop in hops])
    num_layers = _integer(fields["num_layers"], "num_layers of a plan")
    if num_layers > _MOST_LAYERS:
        raise PlanError(f"num_layers of a plan must be at most {_MOST_LAYERS}")
    return PlanRecord(
        num_layers=num_layers,
        ranges=ranges,
        routes=routes,
        split_backward=split_backward,
        recompute=_recompute(fields.get("recompute", {})),
        fused_workers=[
            _integer(worker, "a worker in fused_workers of a plan")
            for worker in _list(fields.get("fused_workers", []), "fused_workers of a plan")
        ],
    )


def _recompute(value: object) -> dict[int, tuple[int, ...] | None]:
    if isinstance(value, list):
        return dict.fromkeys(_integer(worker, "a worker in recompute of a plan") for worker in value)
    found: dict[int, tuple[int, ...] | None] = {}
    for worker, own in _by_worker(value, "recompute of a plan").items():
        count = 3 if isinstance(own, list) and len(own) > 2 else 2
        found[worker] = tuple(_integers(own, count, f"recompute of worker {worker}"))
    return found


def _by_worker(value: object, where: str) -> dict[int, object]:
    found: dict[int, object] = {}
    for key, item in _object(value, where).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS) or int(key) in found:
            raise PlanError(f"{where} must map worker ids to ranges; got the worker {key!r}")
        found[int(key)] = item
    return found


def _pair(value: object, where: str) -> tuple[int, int]:
    start, stop = _integers(value, 2, where)
    return start, stop


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be a JSON object; got {value!r:.60}")
    return value


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise PlanError(f"{where} must be a list; got {value!r:.60}")
    return value


def _integer(value: object, where: str) -> int:
    # JSON's true is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{where} must be an integer; got {value!r:.60}")
    return value


def _integers(value: object, count: int, where: str) -> list[int]:
    items = _list(value, where)
    if len(items) != count:
        raise PlanError(f"{where} must hold lists of {count} integers; got {value!r:.60}")
    return [_integer(item, where) for item in items]
