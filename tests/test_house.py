"""The house: which part may import which, what importing a part costs, and what the package offers to everyone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import chameleon_ft

SOURCE = Path(chameleon_ft.__file__).parent

PURE = {"errors", "workload", "cluster", "plan", "schedule", "sync", "recovery"}
JOBS = {"keys", "config", "job", "data", "models", "optim"}

# A part and the others that it may import.
MAY_IMPORT = {
    "errors": set[str](),
    "workload": {"errors"},
    "cluster": {"errors"},
    "plan": {"errors"},
    "schedule": {"errors", "workload", "cluster", "plan"},
    "sync": {"errors", "plan"},
    "recovery": {"errors", "workload", "cluster", "plan", "schedule"},
    "keys": set[str](),
    "config": {"errors"},
    "job": {"errors", "keys", "config"},
    "data": {"errors", "keys", "config", "job"},
    "optim": set[str](),
    "models": {"errors", "keys", "config", "job", "data", "optim"},
    "observe": {"errors", "config"},
    "verify": JOBS | {"errors", "observe"},
    "control": PURE | {"config", "observe"},
    "runtime": PURE | JOBS | {"observe", "control"},
    "launch": {"errors", "config", "observe", "control", "runtime"},
    "cli": {"errors", "config", "job", "data", "observe", "control", "launch", "verify"},
}

PUBLIC = {
    "BoundarySpec",
    "ChameleonError",
    "ConfigError",
    "Job",
    "RunConfig",
    "TrainConfig",
    "__version__",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (part, file) for every module below the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if not part.startswith("__"):
            yield part, path


def imported_parts(path: Path) -> set[str]:
    """Return the parts that a file imports when it runs; what only a type checker reads does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "chameleon_ft" else {f"chameleon_ft.{a.name}" for a in node.names}
    return {name.split(".")[1] for name in names if name.startswith("chameleon_ft.")}


def test_every_part_is_known() -> None:
    assert {part for part, _ in modules()} == set(MAY_IMPORT)


def test_imports_point_one_way() -> None:
    forbidden = {
        str(path.relative_to(SOURCE)): sorted(imported_parts(path) - MAY_IMPORT[part] - {part})
        for part, path in modules()
    }
    assert {path: parts for path, parts in forbidden.items() if parts} == {}


def test_the_directions_have_no_cycle() -> None:
    left = {part: set(others) for part, others in MAY_IMPORT.items()}
    while left:
        free = {part for part, others in left.items() if not others}
        assert free, f"these import each other: {sorted(left)}"
        left = {part: others - free for part, others in left.items() if part not in free}


@pytest.mark.parametrize(
    "module",
    ["chameleon_ft", *(f"chameleon_ft.{part}" for part in sorted(PURE)), "chameleon_ft.job", "chameleon_ft.observe"],
)
def test_what_decides_and_what_reads_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


def test_the_coordinator_needs_no_torch() -> None:
    code = "import sys, chameleon_ft.launch; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


def test_the_public_surface() -> None:
    assert set(chameleon_ft.__all__) == PUBLIC
    assert all(hasattr(chameleon_ft, name) for name in PUBLIC)
    assert set(dir(chameleon_ft)) >= PUBLIC


def test_what_is_not_there_is_missed_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = chameleon_ft.Trainer


def test_every_public_module_that_defines_something_says_what_it_offers() -> None:
    public = [path for _, path in modules() if not path.name.startswith("_")]
    silent = [str(path.relative_to(SOURCE)) for path in public if not says_what_it_offers(path)]
    assert silent == []


def says_what_it_offers(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assigned = {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return "__all__" in assigned or all(name.startswith("_") for name in defined)
