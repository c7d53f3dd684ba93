"""`spo plan`: what a job needs and which settings make it fit, without a platform and without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spo.console import ExitCode, Output, print_document, print_rows
from spo.spec.job_spec import parse_job_spec
from spo.spec.plan.plan import GIGABYTE, plan_job, rows
from spo.spec.plan.shapes import named_shape, shape_of_folder
from spo.spec.plan.speed import Device
from spo.spec.plan.unlearned import unlearned_shares
from spo.spec.spec_file import read_spec


def plan(
    file: Annotated[Path, typer.Argument(help="The job's spec.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices of the trainer.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=1, help="Of each device, GB.")] = 80,
    model_shape: Annotated[str | None, typer.Option(help="A published model's sizes in place of the folder's.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
) -> None:
    """Memory of every role, sizes on disk, modelled speed; fails when it does not fit, saying what would.

    A share of the mix that nothing learns from is a warning.
    """
    document = read_spec(file)
    document.setdefault("model", {}).setdefault("path", "/models/pi0")
    spec = parse_job_spec(document)
    shape = named_shape(model_shape) if model_shape else shape_of_folder(Path(spec.model.path))
    found = plan_job(spec, shape, gpus, Device(memory_bytes=int(gpu_memory * GIGABYTE)))
    unlearned = list(unlearned_shares(spec))
    if output is Output.TABLE:
        print_rows(rows(found), ("role", "what", "needs"), output)
    else:
        print_document({**found.document(), "spec_warnings": [asdict(each) for each in unlearned]}, output)
    for each in unlearned:
        typer.echo(f"warning: {each.pointer}: {each.message}", err=True)
    for warning in found.warnings:
        typer.echo(f"does not fit: {warning}", err=True)
    if found.warnings:
        raise typer.Exit(ExitCode.INVALID_INPUT)
