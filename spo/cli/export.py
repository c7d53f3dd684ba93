"""`spo export`: a weight version as a folder that transformers, vLLM or peft load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from spo.cli.jobs import JobId, api
from spo.console import console
from spo.errors import IntegrityError, InvalidInput
from spo.weights.model_folders import write_export
from spo.weights.store import WeightStore


def export_weights(
    job_id: JobId,
    out: Annotated[Path, typer.Argument(help="Folder to make; must not be there yet.")],
    *,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Default: the newest.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="An adapter: a whole model, the adapter in its weights.")
    ] = False,
) -> None:
    """Write a weight version as a model folder, or as peft's folder where the job trains an adapter (LoRA).

    Reads the weight store and the job's model folder, so both must be reachable from here.
    """
    if out.exists():
        raise InvalidInput(f"{out} is there already; name a folder to make")
    with api() as client:
        model = Path(client.get(job_id).spec["model"]["path"])
        published = client.weights(job_id)
    chosen = next((found for found in reversed(published) if version in (None, found.version)), None)
    if chosen is None:
        known = ", ".join(str(found.version) for found in published) or "none"
        raise InvalidInput(f"{job_id} has published these versions: {known}", code="unknown_version")
    stored = WeightStore(chosen.uri.rpartition("/")[0].rpartition("/")[0]).open(job_id, chosen.version)
    if stored.manifest_digest != chosen.manifest_digest:
        raise IntegrityError(f"{chosen.uri} is not the version that was published")
    try:
        write_export(model, stored, out, merge=merge)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    console.print(f"version {chosen.version} of {job_id}, step {chosen.step}: {out}")
