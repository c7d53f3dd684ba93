"""All ranks save their training state together, and resume from the best checkpoint that is intact."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.trainer.checkpoints.places import CheckpointFolder, CheckpointPlace, SavedCheckpoint
from services.trainer.checkpoints.training_state import TrainingProgress, TrainingState, part_name, progress_in
from services.trainer.ranks import Ranks
from spo.errors import IntegrityError, NotFound, PreconditionFailed, SpoError
from spo.manifest_folder import Manifest
from spo.observability.logs import get_logger
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("checkpoints")


def checkpoint_place(grant: wire.LeaseJobResponse, state_path: Path) -> CheckpointPlace:
    """Where a leased job's checkpoints are. Raises InvalidInput where that is no place."""
    if "://" not in grant.checkpoint_path:
        return CheckpointFolder(Path(grant.checkpoint_path))
    # Imported here: a trainer with a shared folder needs no client of object stores.
    from services.trainer.checkpoints.bucket import CheckpointBucket

    return CheckpointBucket(grant.checkpoint_path, local_folder(grant, state_path))


def local_folder(grant: wire.LeaseJobResponse, state_path: Path) -> Path:
    """The job's folder on this machine; with a shared folder its checkpoints are in there."""
    if "://" not in grant.checkpoint_path:
        return Path(grant.checkpoint_path)
    return state_path.absolute() / "checkpoints" / grant.run_id


def save_checkpoint(
    ranks: Ranks, training: TrainingState, place: CheckpointPlace, progress: TrainingProgress, *, epoch: int
) -> Future[SavedCheckpoint] | None:
    """All ranks write their part; rank 0 gets what is done once the checkpoint is whole.

    None when it could not be written: logged, the previous one stays, training goes on. Raises, on rank 0 alone,
    ResourceExhausted where there is no room and Conflict when a newer owner has written this step.
    """
    try:
        return place.save(ranks, training, progress, epoch)
    except OSError as error:
        log.error("the checkpoint was not written; training goes on without it", step=progress.step, why=str(error))
        return None


def load_checkpoint(
    ranks: Ranks, training: TrainingState, place: CheckpointPlace, recorded: wire.RecordedCheckpoints | None = None
) -> TrainingProgress | None:
    """Bring every rank to the first recorded checkpoint that is intact; None when there is none.

    recorded: what owners of the job reported while they were; None takes the newest. A damaged one is named in the log
    and passed over, like one that another trainer put in its place; one of another number of ranks is resharded.
    Raises, on all ranks alike, PreconditionFailed when it was written at another ZeRO stage, Unreachable.
    """
    candidates = _candidates(place, recorded) if ranks.leads else []
    for step, digest in ranks.share(candidates):
        manifest = _told(ranks, step, *_manifest(place, step, digest) if ranks.leads else (None, None))
        if manifest is None:
            continue
        written_by, stage = int(manifest["world_size"]), int(manifest["zero_stage"])
        if stage != training.stage:
            raise PreconditionFailed(
                f"checkpoint {step} was written at ZeRO stage {stage}; resume it so, not at {training.stage}",
                code="checkpoint_layout",
            )
        wanted = [ranks.rank] if written_by == ranks.world_size else range(written_by)
        files = _parts(ranks, place, step, manifest, [part_name(rank) for rank in wanted])
        if files is None:
            continue
        if ranks.leads:
            log.info("resuming", step=step, written_by_ranks=written_by, ranks=ranks.world_size)
        _load(ranks, training, files, written_by)
        return progress_in(manifest)
    if candidates:
        log.error("no checkpoint of the run is intact; training begins anew", tried=[step for step, _ in candidates])
    return None


def _candidates(place: CheckpointPlace, recorded: wire.RecordedCheckpoints | None) -> list[tuple[int, str]]:
    """(step, manifest digest or "" for any), the one to prefer first."""
    if recorded is None:
        return [(step, "") for step in reversed(place.steps())]
    return [(each.step, each.manifest_digest) for each in recorded.items]


def _manifest(place: CheckpointPlace, step: int, digest: str) -> tuple[Manifest | None, SpoError | None]:
    try:
        return place.manifest(step, digest), None
    except SpoError as error:
        return None, error


def _told(ranks: Ranks, step: int, manifest: Manifest | None, problem: SpoError | None) -> Manifest | None:
    """Rank 0's manifest on every rank, None where it is damaged; its other errors are raised on all."""
    found = ranks.share((manifest, problem))
    return None if _passed_over(ranks, step, [found[1]]) else found[0]


def _parts(
    ranks: Ranks, place: CheckpointPlace, step: int, manifest: Manifest, names: Sequence[str]
) -> list[Path] | None:
    """This rank's files; None on every rank where those of any are damaged."""
    files: list[Path] = []
    problem: SpoError | None = None
    try:
        files = place.parts(step, manifest, names)
    except SpoError as error:
        problem = error
    return None if _passed_over(ranks, step, ranks.gather(problem)) else files


def _passed_over(ranks: Ranks, step: int, problems: Sequence[SpoError | None]) -> bool:
    """Whether a checkpoint is damaged; raises what else went wrong on any rank."""
    found = [problem for problem in problems if problem]
    for problem in found:
        if not isinstance(problem, IntegrityError | NotFound):
            raise problem
        if ranks.leads:
            log.warning("a damaged checkpoint is passed over", step=step, reason=problem.message)
    return bool(found)


def _load(ranks: Ranks, training: TrainingState, files: Sequence[Path], written_by: int) -> None:
    if written_by == ranks.world_size:
        tensors = load_file(files[0])
        torch.set_rng_state(tensors.pop("random.cpu"))
        if ranks.device.type == "cuda":
            torch.cuda.set_rng_state(tensors.pop("random.cuda"), ranks.device)
    else:
        # The policy is trained without dropout: nothing draws random numbers, so none are carried over.
        tensors = training.reshard_state_tensors(files)
    training.load_state_tensors(tensors)
