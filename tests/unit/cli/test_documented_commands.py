"""The `spo` commands of the pages on Kubernetes, two machines and Slurm: the command line's parser takes each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from spo.cli.app import app

DOCS = Path(__file__).parents[3] / "docs"
COMMAND = re.compile(r"^(?:\w+=\S+ )*spo (?P<words>.*)$", re.M)
FOUND = sorted(
    {
        match["words"]
        for name in ("kubernetes", "two_machines", "slurm")
        for block in re.findall(r"^```\w*[^\n]*\n(.*?)^```", (DOCS / f"{name}.md").read_text(), re.M | re.S)
        for match in COMMAND.finditer(block)
    }
)


def test_there_are_some() -> None:
    assert len(FOUND) >= 3


@pytest.mark.parametrize("written", FOUND)
def test_the_command_line_takes_what_the_page_says(written: str) -> None:
    words = shlex.split(written, comments=True)
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="spo")
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
        context = typer.Context(command, info_name=command.name, parent=context)
    # Files that a page has just made are not there.
    words = [str(DOCS / "index.md") if word == "job.yaml" else word for word in words]
    assert command.parse_args(context, words) == []
