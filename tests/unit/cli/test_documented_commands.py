"""The `spo` commands of documents: the parser takes those of pages that lead step by step and knows those of others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from spo.cli.app import app

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
COMMAND = re.compile(r"^(?:\w+=\S+ )*spo (?P<words>.*)$", re.M)
FOUND = sorted(
    {
        match["words"]
        for name in ("kubernetes", "two_machines", "slurm")
        for block in re.findall(r"^```\w*[^\n]*\n(.*?)^```", (DOCS / f"{name}.md").read_text(), re.M | re.S)
        for match in COMMAND.finditer(block)
    }
)


@cache
def command_line() -> Any:
    """Built once: it takes a tenth of a second, and documents name hundreds of commands."""
    return typer.main.get_command(app)


def test_there_are_some() -> None:
    assert len(FOUND) >= 3


@pytest.mark.parametrize("written", FOUND)
def test_the_command_line_takes_what_the_page_says(written: str) -> None:
    words = shlex.split(written, comments=True)
    command = command_line()
    context = typer.Context(command, info_name="spo")
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
        context = typer.Context(command, info_name=command.name, parent=context)
    # Files that a page has just made are not there.
    words = [str(DOCS / "index.md") if word == "job.yaml" else word for word in words]
    assert command.parse_args(context, words) == []


def _unknown_words(written: str) -> Iterator[str]:
    """Commands and options that the command line does not have."""
    command, words = command_line(), re.split(r"\s[#|>]|\s2>|;", written)[0].split()
    while words and hasattr(command, "commands"):
        word = words.pop(0)
        if word not in command.commands:
            yield word
            return
        command = command.commands[word]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    yield from {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)} - known - {"--help"}


def test_no_document_names_a_command_or_option_that_is_not_there() -> None:
    documents = [ROOT / "README.md", ROOT / "helm" / "spo" / "README.md", *DOCS.rglob("*.md")]
    unknown = {}
    for document in documents:
        text = document.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^```\w*[^\n]*\n(.*?)^```", text, re.M | re.S)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        commands = [
            each
            for block in blocks
            for each in re.findall(r"^(?:\w+=\S+ )*(?:\.venv/bin/)?spo ([a-z].*)$", block, re.M)
        ]
        commands += re.findall(r"`(?:\.venv/bin/)?spo ([a-z][^`]*)`", prose)
        if words := [f"{word} in spo {each}" for each in commands for word in _unknown_words(each)]:
            unknown[document.name] = words
    assert unknown == {}
