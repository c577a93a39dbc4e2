"""Draws the picture of architecture.md from the imports of the code: `python docs/architecture.py`.

A package stands above all packages that it imports. An arrow leads to each package that it imports and that it does
not reach through another one (the transitive reduction of the import graph). The words are those of the page's list.
A test compares the picture with the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import networkx as nx

import chameleon_ft

PAGE = Path(__file__).with_name("architecture.md")
PICTURE = Path(__file__).parent / "pictures" / "architecture.svg"
SOURCE = Path(chameleon_ft.__file__).parent
BOX_WIDTH, BOX_HEIGHT, ROW, GAP = 178, 62, 96, 18
PURE, IMPURE = "#e3f1e5", "#e4ebf6"


def imports() -> nx.DiGraph:
    """Return the graph of packages, with an edge from each package to each one that it imports."""
    graph = nx.DiGraph()
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).with_suffix("").parts[0]
        if package.startswith("__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("chameleon_ft"):
                names = [node.module] if "." in node.module else [f"{node.module}.{name.name}" for name in node.names]
                graph.add_edges_from((package, name.split(".")[1]) for name in names if "__" not in name)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def described() -> tuple[dict[str, str], frozenset[str]]:
    """Return the content of each package, from the page's list, and the packages of the pure part."""
    pure, _, others = PAGE.read_text(encoding="utf-8").partition("The other packages")
    entry = re.compile(r"^- \*\*`(\w+)`\*\*: ([^.]+)\.", re.MULTILINE)
    ours = {name: " ".join(content.split()) for name, content in entry.findall(pure)}
    return ours | {name: " ".join(content.split()) for name, content in entry.findall(others)}, frozenset(ours)


def rows(graph: nx.DiGraph) -> list[list[str]]:
    """Return the nodes by row, from the top, ordered so that few edges cross.

    Rows are the topological generations. Within a row, nodes are ordered by the mean position of their neighbours in
    the row before, in sweeps down and up (the barycenter heuristic of Sugiyama et al., 1981).
    """
    rows = [sorted(row) for row in nx.topological_generations(graph)]
    for sweep in range(24):
        down = sweep % 2 == 0
        near, ordered = (graph.pred, rows) if down else (graph.succ, rows[::-1])
        for before, row in pairwise(ordered):
            at = {name: column / max(len(before) - 1, 1) for column, name in enumerate(before)}
            mean = {name: fmean([at[other] for other in near[name] if other in at] or [0.5]) for name in row}
            row.sort(key=lambda name: (mean[name], name))
    return rows


def routed(graph: nx.DiGraph) -> tuple[nx.DiGraph, dict[tuple[str, str], list[str]]]:
    """Return `graph` with an empty node in each row that an edge passes, and the nodes of each edge, downwards."""
    level = {name: depth for depth, row in enumerate(nx.topological_generations(graph)) for name in row}
    paths = {
        (upper, lower): [upper, *(f"{upper}>{lower}>{depth}" for depth in range(level[upper] + 1, level[lower])), lower]
        for upper, lower in graph.edges
    }
    longer = nx.DiGraph()
    longer.add_nodes_from(graph)
    for path in paths.values():
        nx.add_path(longer, path)
    return longer, paths


def picture() -> str:
    """Return the picture as SVG."""
    graph, paths = routed(nx.transitive_reduction(imports()))
    words, pure = described()
    at: dict[str, tuple[float, float]] = {}
    """Centre of the upper edge of each node, in pixels."""
    wide = {name: GAP if ">" in name else BOX_WIDTH + GAP for name in graph}
    placed = rows(graph)
    width = max(sum(wide[name] for name in row) for row in placed) + GAP
    for depth, row in enumerate(placed):
        left = (width - sum(wide[name] for name in row)) / 2
        for name in row:
            at[name] = left + wide[name] / 2, GAP + depth * ROW
            left += wide[name]
    height = GAP + len(placed) * ROW - (ROW - BOX_HEIGHT) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#8a94a3"/></marker>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for _, path in sorted(paths.items()):
        x, y = at[path[0]]
        curve = f"M{x:g} {y:g}"
        for name in path:
            (before_x, before_y), (x, y) = (x, y), at[name]
            if name != path[0]:
                bend = (before_y + y) / 2
                curve += f"C{before_x:g} {bend:g} {x:g} {bend:g} {x:g} {y:g}"
            y += BOX_HEIGHT
            if name != path[-1]:
                curve += f"V{y:g}"
        lines.append(f'<path d="{curve}" fill="none" stroke="#8a94a3" stroke-width="1.3" marker-end="url(#tip)"/>')
    for name, (x, y) in sorted(at.items()):
        if ">" in name:
            continue
        left = x - BOX_WIDTH / 2
        lines.append(
            f'<rect x="{left:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7" '
            f'fill="{PURE if name in pure else IMPURE}" stroke="#59636f"/>'
            f'<text x="{left + 9:g}" y="{y + 19:g}" font-size="14" font-weight="bold">{name}</text>'
        )
        for line, text in enumerate(textwrap.wrap(words.get(name, ""), 28, max_lines=2, placeholder=" …")):
            lines.append(f'<text x="{left + 9:g}" y="{y + 36 + 15 * line:g}" font-size="11">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
