"""Every relative link of every Markdown file of the repository leads somewhere, to a heading where it names one."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1?\2`*\s*$|(?<!`)(`+)(?!`).+?(?<!`)\3(?!`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)


def markdown_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@cache
def anchors(path: Path) -> frozenset[str]:
    """The ids that headings get: as GitHub makes them, and as MkDocs does."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", text))
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        kept = re.sub(r"[^\w\s-]", "", plain).strip()
        found |= {re.sub(r"\s", "-", kept), re.sub(r"[-\s]+", "-", kept)}
    return frozenset(found)


def broken_links(path: Path) -> list[str]:
    text = CODE.sub("", path.read_text())
    broken = []
    for link in [*LINK.findall(text), *REFERENCE.findall(text)]:
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
            continue
        place, _, anchor = unquote(link).partition("#")
        target = (path.parent / place).resolve() if place else path
        missing = not target.exists() or not target.is_relative_to(ROOT)
        if missing or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_every_link_leads_somewhere() -> None:
    files = markdown_files()
    assert len(files) > 30

    assert {str(path.relative_to(ROOT)): links for path in files if (links := broken_links(path))} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    (tmp_path / "b.md").write_text("# The `b` of it\n")
    page.write_text("[x](gone.md) ![y](gone.png 'title') [z](b.md#no) `[c](code.md)`\n\n```\n[d](code.md)\n```\n")

    assert [link for link in broken_links(page) if "b.md" not in link] == ["gone.md", "gone.png"]
    assert "the-b-of-it" in anchors(tmp_path / "b.md")
