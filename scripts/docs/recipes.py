"""The page of the recipes: every job spec of deploy/recipes, with what its first comment says."""

from __future__ import annotations

from pathlib import Path


def page(root: Path) -> str:
    """Markdown of the recipes by folder."""
    folder = root / "deploy" / "recipes"
    lines = [
        "# Recipes",
        "",
        "Job specs to start from; copy one, set `model.path` and `tasks`, and submit it:",
        "",
        "```",
        "spo job submit my_job.yaml --wait",
        "```",
        "",
    ]
    for place in sorted(folder.rglob("*.yaml")):
        text = place.read_text()
        said = []
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            said.append(line.lstrip("# "))
        lines += [f"## {place.relative_to(folder)}", "", " ".join(said), "", "```yaml", text.strip(), "```", ""]
    return "\n".join(lines)
