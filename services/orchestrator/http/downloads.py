"""A weight version as a model folder in a tar archive: written aside, opened, unlinked, and read while it is sent."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from services.orchestrator.container import AppContext
from spo.disk_space import told_when_full
from spo.errors import IntegrityError, NotFound
from spo.weights.model_folders import write_export
from spo.weights.tar_stream import TarMember, open_members

ABANDONED_SECONDS = 86_400.0


def weights_as_members(context: AppContext, job_id: str, version: int, *, merge: bool) -> list[TarMember]:
    """The files of a published version as `spo export` makes them; they take no space once they are closed.

    Raises NotFound, IntegrityError when it is damaged or not what was published, InvalidInput, ResourceExhausted.
    """
    published = {int(found["version"]): found["manifest_digest"] for found in context.weights.versions(job_id)}
    if version not in published:
        raise NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")
    stored = context.weight_store.open(job_id, version)
    if stored.manifest_digest != published[version]:
        raise IntegrityError(f"{stored.uri} is not the version that was published")
    # Beside the weights where they are a folder, so that links take the place of copies.
    place = context.settings.state_path.absolute() / "downloads"
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    with told_when_full(place, stored.size_bytes), tempfile.TemporaryDirectory(dir=place) as writing:
        model = context.files.models.expected(context.jobs.spec(job_id).model.path)
        write_export(model, stored, Path(writing) / "model", merge=merge)
        return open_members(Path(writing) / "model")


def _remove_abandoned(place: Path) -> None:
    """What an orchestrator left that was killed while it merged an adapter."""
    for folder in place.iterdir():
        if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
