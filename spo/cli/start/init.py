"""`spo init`: a commented job for a model's folder and a file of problems, with settings that fit this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from spo.cli.preview import tasks_and_model
from spo.cli.start.facts import look_at_machine, look_at_model, look_at_problems
from spo.cli.start.job_file import write_job
from spo.cli.tasks import probed_prompts
from spo.console import console
from spo.errors import InvalidInput
from spo.spec.spec_file import read_spec
from spo.tasks.learnability import MOST_PROBED, PROBE_SAMPLES, learnability, probe_document
from spo.tasks.load import load_tasks


def init(
    model: Annotated[Path, typer.Argument(help="Folder of the model to start from.", exists=True, file_okay=False)],
    tasks: Annotated[Path, typer.Argument(help="Problems: a file, a folder, or a `tasks` section.", exists=True)],
    out: Annotated[Path, typer.Option("--out", help="File to write; one that is there stays.")] = Path("job.yaml"),
    kind: Annotated[
        str, typer.Option("--kind", help="Of a file of problems: jsonl, taco, code_contests, ...")
    ] = "jsonl",
    *,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the running platform what the model makes of the problems first.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest wait for the probe, seconds.")] = 86_400,
) -> None:
    """Look at a model and problems and write a commented job whose settings fit them and this machine."""
    if out.exists():
        raise InvalidInput(f"{out} is there already; name another with --out", code="unwritable_file")
    about = look_at_model(model)
    wanted, _ = tasks_and_model(tasks, kind, read_spec)
    problems = load_tasks(wanted.model_copy(update={"evaluation_problems": 0})).train
    source = Path(wanted.path) if wanted.path else tasks
    facts = look_at_problems(source, wanted.kind, problems, about)
    machine = look_at_machine()
    name = f"{model.absolute().name} on {source.stem}"
    text = write_job(name, about, facts, machine)
    if probe:
        document = probe_document(yaml.safe_load(text), PROBE_SAMPLES, MOST_PROBED)
        found = learnability(probed_prompts(document, MOST_PROBED, timeout))
        text = write_job(name, about, facts, machine, found)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from None
    console.print(f"{out}: {facts.problems} problems, {machine.words}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"next: spo job submit {out} --wait", markup=False, highlight=False, soft_wrap=True)
