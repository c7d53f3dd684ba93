"""What the documentation site adds to docs/: reference pages written from the code, and links into the sources.

Pages below reference/ exist only in the site, so they cannot go stale: documents link to what they are written from,
which is there in the repository, and in the site such a link leads to the page. Another link from docs/ to a file must
lead to one of the repository; in the site, which has no sources, its text remains.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
log = logging.getLogger("mkdocs.hooks.spo")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+|openapi\.json)(#[^)\s]*)?\)")
# What a page of the reference is written from -> the page.
WRITTEN_FROM = {
    "deploy/recipes": "recipes",
    "docs/openapi.json": "rest",
    "spo/cli": "cli",
    "spo/client": "sdk",
    "spo/error_codes.txt": "errors",
    "spo/spec": "job_spec",
}


def _module(name: str) -> ModuleType:
    place = importlib.util.spec_from_file_location(f"spo_docs_{name}", HERE / f"{name}.py")
    assert place
    assert place.loader
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def on_config(config: Any) -> Any:
    """Name the decisions in the navigation, by their titles and in their order, and pages that nobody placed."""
    folder = Path(config["docs_dir"])
    placed = str(config["nav"])
    more = [each.name for each in sorted(folder.glob("*.md")) if f"'{each.name}'" not in placed]
    decisions = sorted((folder / "decisions").glob("*.md"))
    config["nav"].append({"Decisions": [f"decisions/{each.name}" for each in decisions]})
    if more:
        config["nav"].append({"More": more})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are written from the code."""
    for name in ("cli", "rest", "sdk", "job_spec", "metrics", "recipes", "errors"):
        text = _module(name).page(ROOT)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Check links that leave docs/ and keep their text."""
    folder = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def kept(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        place = (folder / target).resolve()
        page_name = WRITTEN_FROM.get(str(place.relative_to(ROOT))) if place.is_relative_to(ROOT) else None
        if page_name:
            written = Path(config["docs_dir"]) / "reference" / f"{page_name}.md"
            return f"[{text}]({os.path.relpath(written, folder)}{anchor or ''})"
        if place.is_relative_to(Path(config["docs_dir"]).resolve()):
            return found[0]
        if not place.exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, target)
        return text

    return _OUTSIDE.sub(kept, markdown)
