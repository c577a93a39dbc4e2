"""The package as a whole: what loads torch, how its names are found, and which of the impure parts may import which.

What holds for the pure part, and the surface of each module, is in test_architecture.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chameleon_ft

SOURCE = Path(chameleon_ft.__file__).parent

PURE = {
    "errors",
    "quantities",
    "workload",
    "cluster",
    "plan",
    "schedule",
    "sync",
    "recovery",
    "presets",
    "estimate",
    "transfer",
    "search",
}
JOBS = {"keys", "config", "job", "data", "models", "optim"}

# An impure part and the others that it may import when it runs.
MAY_IMPORT = {
    "keys": set[str](),
    "optim": set[str](),
    "config": {"errors"},
    "job": {"errors", "keys", "config"},
    "data": {"errors", "keys", "config", "job"},
    "profiles": PURE | {"config"},
    "models": {"errors", "keys", "config", "job", "data", "optim", "profiles"},
    "observe": PURE | {"config"},
    "simulate": PURE | {"observe"},
    "verify": JOBS | {"errors", "observe"},
    "control": PURE | {"config", "observe", "profiles"},
    "runtime": PURE | JOBS | {"observe", "control", "profiles"},
    "launch": {"errors", "config", "observe", "plan", "recovery", "control", "profiles", "runtime"},
    "deploy": {"errors", "config"},
    "cli": PURE
    | {"config", "job", "data", "observe", "control", "profiles", "runtime", "launch", "deploy", "verify", "simulate"},
}


def imported_parts(path: Path) -> set[str]:
    """Return the parts that a file imports when it runs; what only a type checker reads does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("chameleon_ft.")}


def test_imports_point_one_way() -> None:
    forbidden = {}
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in PURE or part.startswith("__"):
            continue
        forbidden[str(path.relative_to(SOURCE))] = sorted(imported_parts(path) - MAY_IMPORT[part] - {part})
    assert {path: parts for path, parts in forbidden.items() if parts} == {}


@pytest.mark.parametrize(
    "part", ["", ".config", ".job", ".data", ".models", ".observe", ".control", ".launch", ".cli", ".simulate"]
)
def test_what_does_not_compute_loads_no_torch(part: str) -> None:
    code = f"import sys, chameleon_ft{part}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("part", ["", ".cli", ".control.wire.messages", ".runtime.rank", ".recovery", ".simulate"])
def test_to_import_is_not_to_compile(part: str) -> None:
    code = f"import sys, chameleon_ft{part}; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


def test_names_are_imported_on_first_use() -> None:
    assert all(hasattr(chameleon_ft, name) for name in chameleon_ft.__all__)
    assert set(dir(chameleon_ft)) == set(chameleon_ft.__all__)


def test_a_name_that_is_not_there_is_missed_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = chameleon_ft.Trainer
