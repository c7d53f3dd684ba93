"""Folders import each other in one direction: no circle among the children of any package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]
Graph = dict[str, set[str]]


def _modules() -> dict[str, Path]:
    paths = [path for root in ("spo", "services") for path in (ROOT / root).rglob("*.py")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
        if ROOT / "spo" / "v1" not in path.parents
    }


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, also within functions; what only the type checker reads is left out."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        # Expressions import nothing, and are most of a file.
        nodes.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (found := name if name in modules else node.module) in modules:
                    yield found


def siblings(modules: dict[str, Path]) -> dict[str, Graph]:
    """For each package, which of its children imports which other."""
    graphs: dict[str, Graph] = defaultdict(lambda: defaultdict(set))
    for name, path in modules.items():
        for other in _imported(path, modules):
            own, their = name.split("."), other.split(".")
            shared = next((n for n, pair in enumerate(zip(own, their, strict=False)) if pair[0] != pair[1]), None)
            if shared:
                graphs[".".join(own[:shared])][own[shared]].add(their[shared])
    return graphs


def circles(graphs: dict[str, Graph]) -> list[str]:
    """The packages whose children import each other in a circle, with one of the circles."""
    found: list[str] = []
    for package, graph in sorted(graphs.items()):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{package}: {' -> '.join(error.args[1])}")
    return found


def test_the_children_of_every_package_import_in_one_direction() -> None:
    graphs = siblings(_modules())

    assert {"spo", "services.orchestrator"} <= graphs.keys()
    assert circles(graphs) == []


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    only_for_types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from p import a"
    for name, text in (
        ("a", "from p.b import x"),
        ("b", "def f():\n    try:\n        from p import a\n    except ImportError:\n        raise"),
        ("c", "import p.a"),
        ("d", only_for_types),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    modules = {f"p.{name}": tmp_path / f"{name}.py" for name in "abcd"}

    assert siblings(modules)["p"] == {"a": {"b"}, "b": {"a"}, "c": {"a"}}
    assert circles(siblings(modules)) == ["p: a -> b -> a"]
