"""`spo convert`: problem files and jobs from the data sets and configurations of verl and TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from spo.cli.start.foreign_configs import convert_config
from spo.cli.start.foreign_rows import convert_rows
from spo.console import console, error_console
from spo.errors import InvalidInput
from spo.spec.spec_file import read_spec
from spo.spec.task_sources import ComparisonName, ExtractionName

convert = typer.Typer(no_args_is_help=True, help="Files of verl and TRL as files of this platform.")


@convert.command("rows")
def rows(
    source: Annotated[Path, typer.Argument(help="Their rows, JSONL or Parquet.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Problem file to write, JSONL; one that is there stays.")],
    answer: Annotated[str | None, typer.Option("--answer", help="The column of the right answer.")] = None,
    extraction: Annotated[
        ExtractionName, typer.Option("--extraction", help="Where a response has its answer.")
    ] = "boxed",
    comparison: Annotated[ComparisonName, typer.Option("--comparison", help="When it is right.")] = "math",
    marker: Annotated[str, typer.Option("--marker", help="Of the extraction after_marker or xml_tag.")] = "",
) -> None:
    """Rows with a prompt and an answer as problems; data sources that verl scores itself keep its rules."""
    rule: dict[str, str] = {
        "extraction": extraction,
        "comparison": comparison,
        **({"marker": marker} if marker else {}),
    }
    found = convert_rows(source, rule, answer)
    _write(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows))
    console.print(f"{out}: {len(found.rows)} problems", markup=False, highlight=False, soft_wrap=True)
    for system in found.systems[:3]:
        say = f"they had a system prompt: say it as model.chat.system: {json.dumps(system, ensure_ascii=False)[:300]}"
        error_console.print(say, markup=False, highlight=False, soft_wrap=True)


@convert.command("config")
def config(
    trainer: Annotated[Literal["verl", "trl"], typer.Argument(help="Whose.")],
    source: Annotated[
        Path, typer.Argument(help="Their YAML or JSON, as verl prints it and `trl grpo --config` reads it.")
    ],
    out: Annotated[Path, typer.Argument(help="Job to write; one that is there stays.")],
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="The problem file that `spo convert rows` made.")
    ] = None,
) -> None:
    """A job from a configuration; what has no counterpart is named in its comments."""
    found = convert_config(trainer, read_spec(source), str(tasks.absolute()) if tasks else None)
    _write(out, found.text)
    say = f"{out}: {len(found.carried)} settings carried over, {len(found.left)} not (named in it)"
    console.print(say, markup=False, highlight=False, soft_wrap=True)


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{out} is there already; name another", code="unwritable_file") from None
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from None
