"""Write CONTRIBUTING's tree of folders from the first lines of packages' docstrings: `make tree`; a test holds it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- tree: begin (written by `make tree` from the first lines of docstrings) -->"
END = "<!-- tree: end -->"
# The generated protobuf modules are not read by people.
HIDDEN = frozenset({"v1"})


def tree() -> str:
    """The folders of `spo` and of the services, two levels deep, one line each."""
    lines = ["```"]
    for root in ("spo", "services"):
        lines.append(_line(ROOT / root, 0))
        for package in _packages(ROOT / root):
            lines.append(_line(package, 1))
            if root == "services":
                lines += [_line(inner, 2) for inner in _packages(package)]
    return "\n".join([*lines, "```"])


def with_tree(document: str) -> str:
    """The document's text with a fresh tree. Raises ValueError when a marker is missing."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{tree()}\n{END}{rest.split(END)[1]}"


def _packages(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if (path / "__init__.py").exists() and path.name not in HIDDEN | {"_async"}
    )


def _line(package: Path, level: int) -> str:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    name = f"{'  ' * level}{package.name}/"
    return f"{name:<24}{docstring.splitlines()[0]}"


if __name__ == "__main__":
    document = ROOT / "CONTRIBUTING.md"
    document.write_text(with_tree(document.read_text()))
