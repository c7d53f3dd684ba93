"""`spo dead-letters`: entries that were given up on, on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from spo.cli.jobs import LimitOption, OutputOption, api, known_jobs
from spo.client import Client
from spo.console import Output, console, print_document, print_rows

# More than the platform keeps.
MAX_LETTERS = 100_000

dead_letters = typer.Typer(no_args_is_help=True, help="Entries that were given up on: list, show, redrive, drop.")

JobOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        help="Whose; default: those that name no job, for admins.",
        autocompletion=known_jobs,
        show_default=False,
    ),
]
StreamOption = Annotated[
    str, typer.Option("--stream", help="prompts, rollouts, verdicts, estimates or pivotal; default: all.")
]
Letters = Annotated[list[str] | None, typer.Argument(help="Ids, as `list` shows them.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


@dead_letters.command("list")
def list_letters(
    job: JobOption = None, stream: StreamOption = "", limit: LimitOption = 50, output: OutputOption = Output.TABLE
) -> None:
    """Letters, the newest of each stream first, and how many entries of the job were given up on."""
    with api() as client:
        found = client.dead_letters.newest(job, stream, limit)
        totals = client.dead_letters.totals(job) if job and output is Output.TABLE else {}
    print_rows(found, ("id", "job_id", "deliveries", "size_bytes", "reason"), output)
    for name, counts in totals.items():
        if counts.given_up:
            console.print(f"{name}: {counts.given_up} given up on", highlight=False)


@dead_letters.command("show")
def show_letter(
    letter: Annotated[str, typer.Argument(help="Id, as `list` shows it.")],
    job: JobOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """One letter with what it says."""
    with api() as client:
        print_document(client.dead_letters.get(letter, job), output)


@dead_letters.command()
def redrive(
    letters: Letters = None,
    job: JobOption = None,
    stream: StreamOption = "",
    *,
    everything: AllOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Put entries back on their streams, to be handled again."""
    with api() as client:
        ids = _all(client, job, stream) if everything else letters or []
        rows = [{"id": letter, "redriven": client.dead_letters.redrive(letter, job)} for letter in ids]
    print_rows(rows, ("id", "redriven"), output)


@dead_letters.command()
def drop(
    letters: Letters = None,
    job: JobOption = None,
    stream: StreamOption = "",
    *,
    everything: AllOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Forget letters; their job goes on counting them as given up."""
    with api() as client:
        ids = _all(client, job, stream) if everything else letters or []
        for letter in ids:
            client.dead_letters.drop(letter, job)
    print_rows([{"id": letter, "dropped": True} for letter in ids], ("id", "dropped"), output)


def _all(client: Client, job: str | None, stream: str) -> list[str]:
    return [letter.id for letter in client.dead_letters.newest(job, stream, MAX_LETTERS)]
