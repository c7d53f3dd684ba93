"""Documents of the repository on the web page: where their links lead, and what stands for a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.orchestrator.http.pages.platform import document_body

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENTS = sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("tutorials/*.md")) + sorted(DOCS.glob("results/*.md"))


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.stem)
def test_every_link_of_a_document_leads_to_one_that_is_there(file: Path) -> None:
    for address in re.findall(r'href="([^"#]*)', document_body(file)):
        assert (DOCS / address.removeprefix("/docs/")).is_file()
        assert address.startswith("/docs/")


def test_links_upward_and_to_results_lead_there_and_those_out_of_the_documents_nowhere(tmp_path: Path) -> None:
    assert '<a href="/docs/datasets.md' in document_body(DOCS / "tutorials" / "own_problems.md")
    assert '<a href="/docs/results/' in "".join(map(document_body, DOCUMENTS))
    (tmp_path / "outside.md").write_text("[a](../README.md) [b](https://example.org/x.md) ![a curve](x.png)")
    body = document_body(tmp_path / "outside.md")
    assert "href" not in body
    assert "<img" not in body
    assert "(picture: a curve)" in body


def test_pictures_of_the_documents_are_shown_with_what_they_show() -> None:
    shown = {name for file in DOCUMENTS for name in re.findall(r'<img src="/docs/([^"]*)"', document_body(file))}
    assert {"images/job.png", "results/demo.png"} <= shown
    assert all((DOCS / name).is_file() for name in shown)
    assert 'alt="A job while it trains"' in document_body(DOCS / "web_page.md")
