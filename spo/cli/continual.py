"""`spo continual`: jobs that train from stored experience by a schedule and serve what is better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spo.cli.jobs import OutputOption, api
from spo.console import Output, console, print_document, print_rows
from spo.spec.spec_file import read_spec

continual = typer.Typer(no_args_is_help=True, help="Train from stored experience by a schedule, serve what is better.")

NameArgument = Annotated[str, typer.Argument(help="Name of the continual job.")]


@continual.command("put")
def put_continual(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="YAML or JSON: serves, experience, schedule, gate, overrides.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a continual job, or change it."""
    with api() as client:
        print_document(client.continual.put(name, read_spec(file)), output)


@continual.command("ls")
def list_continual(output: OutputOption = Output.TABLE) -> None:
    """All continual jobs, by name."""
    with api() as client:
        found = [each.model_dump(mode="json") for each in client.continual.all()]
    rows = [row if output is not Output.TABLE else row | {"serves": row["spec"]["serves"]} for row in found]
    print_rows(rows, ("name", "serves", "created_at", "waits"), output)


@continual.command("show")
def show_continual(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """One with its rounds: what each learned from, what the gate said, what was put in service."""
    with api() as client:
        found = client.continual.get(name)
    if output is not Output.TABLE:
        print_document(found, output)
        return
    console.print(f"{found.name} improves {found.spec['serves']}; {found.new_trajectories} new trajectories")
    if found.waits:
        console.print(f"waits since {found.waits_since}: {found.waits}", markup=False, highlight=False, soft_wrap=True)
    print_rows(found.history, ("number", "state", "job_id", "began_at", "reason"), output)


@continual.command("run")
def begin_round(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Begin a round as soon as none is under way and anything is new, whatever the schedule says."""
    with api() as client:
        print_document(client.continual.begin_round(name), output)


@continual.command("rm")
def delete_continual(name: NameArgument) -> None:
    """Forget it and its rounds; jobs, weights and what is served stay."""
    with api() as client:
        client.continual.delete(name)
