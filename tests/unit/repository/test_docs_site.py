"""The documentation builds strictly, leads nowhere that is not there, and needs no network to be read."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every warning of the build is a failure."""
    if importlib.util.find_spec("material") is None:
        message = "mkdocs-material is not installed: pip install '.[docs]'"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_every_page_of_the_reference_is_written_from_the_code(site: Path) -> None:
    said = {
        "cli": "spo job submit",
        "rest": "/v1/jobs/{job_id}/cancel",
        "job_spec": "max_tokens_per_micro_batch",
        "metrics": "spo_dead_letters_total",
        "errors": "invalid_job_spec",
        "recipes": "toy/demo.yaml",
    }
    for page, words in said.items():
        assert words in (site / "reference" / f"{page}.html").read_text(), page


def test_a_link_to_what_a_page_is_written_from_leads_to_the_page(site: Path) -> None:
    assert 'href="reference/rest.html#jobstate"' in (site / "concepts.html").read_text()
    assert 'href="reference/errors.html"' in (site / "troubleshooting.html").read_text()


def test_building_it_installs_neither_torch_nor_vllm() -> None:
    command = ["make", "--dry-run", "--always-make", "docs"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "pip install" in told
    assert "'.[docs]'" in told
    assert not re.search(r"\btorch\b|vllm|\.\[cpu", told)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if LINK.search(page.read_text())] == []


def test_a_link_to_a_source_that_is_gone_fails_the_build(site: Path, tmp_path: Path) -> None:
    for name in ("docs", "scripts", "spo", "services", "deploy", "proto", "helm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "docs").iterdir():
        (tmp_path / "docs" / path.name).symlink_to(path)
    page = tmp_path / "docs" / "values.md"
    page.unlink()
    page.write_text("# Values\n\n[gone](../spo/no_such_file.py)\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(settings)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
    )

    assert built.returncode != 0
    assert "no_such_file.py" in built.stderr
