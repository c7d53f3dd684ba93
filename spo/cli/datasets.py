"""`spo dataset`: task sets that are uploaded once and named by jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spo.cli.jobs import LimitOption, OutputOption, TimeoutOption, api
from spo.client.models import DatasetView, TaskFormat
from spo.console import ExitCode, Output, console, print_document, print_rows

datasets = typer.Typer(no_args_is_help=True, help="Upload task sets and see what is wrong with their rows.")

COLUMNS = ("id", "name", "task_format", "state", "uploaded_bytes", "size_bytes", "created_at")


@datasets.command()
def upload(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL or Parquet.")],
    name: Annotated[str, typer.Option("--name", help="Default: the file's.")] = "",
    task_format: Annotated[TaskFormat, typer.Option("--format", help="Schema; jsonl is the platform's own.")] = "jsonl",
    resume: Annotated[str | None, typer.Option("--resume", help="Id of an upload that was cut off.")] = None,
    timeout: TimeoutOption = 3600,
    output: OutputOption = Output.TABLE,
) -> None:
    """Upload a file in parts and wait for the report on its rows."""
    with api() as client:
        found = client.datasets.upload(file, name, task_format, resume)
        found = client.datasets.wait(found.id, timeout)
    _print(found, output)
    if found.state != "ready":
        raise typer.Exit(ExitCode.INVALID_INPUT)


@datasets.command("ls")
def list_datasets(limit: LimitOption = 50, output: OutputOption = Output.TABLE) -> None:
    """Datasets, newest first."""
    with api() as client:
        print_rows(client.datasets.all(limit), COLUMNS, output)


@datasets.command()
def show(dataset_id: str, output: OutputOption = Output.TABLE) -> None:
    """One dataset with what is wrong with its rows."""
    with api() as client:
        _print(client.datasets.get(dataset_id), output)


@datasets.command()
def delete(dataset_id: str, output: OutputOption = Output.TABLE) -> None:
    """Remove a dataset, or an upload that will not be finished; refused while a job uses it."""
    with api() as client:
        client.datasets.delete(dataset_id)
    print_rows([{"deleted": dataset_id}], ("deleted",), output)


def _print(found: DatasetView, output: Output) -> None:
    if output is not Output.TABLE:
        print_document(found, output)
        return
    print_rows([found], COLUMNS, output)
    report = found.report
    if report is None:
        return
    for fault in report.faults:
        console.print(f"{fault.place}: {fault.message}", markup=False, highlight=False, soft_wrap=True)
    counts = f"{report.rows} rows, {report.problems} problems, {report.left_out} left_out"
    console.print(f"{counts}, {report.faults_total} faults_total", markup=False, highlight=False)
