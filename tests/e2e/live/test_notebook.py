"""The tutorial that is a notebook, executed as Jupyter does it, on a platform that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from spo.client import Client

NOTEBOOK = Path(__file__).parents[3] / "docs" / "tutorials" / "a_job_in_a_notebook.ipynb"
API = "http://127.0.0.1:8000"
CELL_SECONDS = 600

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(900)]


def kinds_of_outputs(notebook: Any) -> list[list[str]]:
    """What each cell with code has shown: text, values, pictures; never errors."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", [output.output_type])}) for cell in cells
    ]


def test_it_shows_again_what_it_shows_in_the_documentation(live: Any, reference_model: Path, tmp_path: Path) -> None:
    written = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (first, *_) = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert API in first.source
    first.source = first.source.replace(API, live.url)
    (tmp_path / "pi0").symlink_to(reference_model)

    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    assert kinds_of_outputs(notebook) == kinds_of_outputs(written)
    with Client(live.url) as client:
        (job,) = client.jobs(limit=1)
        before, *_, after = (each.pass_at_k["1"].value for each in client.evaluations(job.id))
    said = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    assert said == f"pass@1 on held-out problems {before:.2f} -> {after:.2f}\n"
