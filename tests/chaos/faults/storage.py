"""Disks: full for a while, and the newest weights or checkpoint with flipped bytes."""

from __future__ import annotations

from pathlib import Path
from random import Random

from spo.manifest_folder import numbered_folders
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.faults.processes import kill

FLIPPED_BYTES = 64


def _full(stage: Stage, random: Random) -> Inflicted | None:
    disk = stage.platform.state_disk
    if not disk.is_small:
        return None
    disk.fill()
    seconds = random.uniform(5, 10)
    return Inflicted(f"the disk of weights and checkpoints is full for {seconds:.1f} s", seconds, disk.empty)


def _weights_damaged(stage: Stage, random: Random) -> Inflicted | None:
    """The newest version no longer has its digest, and a replica that has it in memory is gone."""
    damaged = _damage(stage.platform.state_path / "weights" / stage.job_id, random, spare=0)
    if damaged is None:
        return None
    kill(stage, "inference")
    return Inflicted(f"weights {damaged.parent.name} damaged, kill -9 of inference", killed=("inference",))


def _checkpoint_damaged(stage: Stage, random: Random) -> Inflicted | None:
    damaged = _damage(stage.platform.state_path / "checkpoints" / stage.job_id, random, spare=1)
    if damaged is None:
        return None
    kill(stage, "trainer")
    return Inflicted(f"checkpoint {damaged.parent.name} damaged, kill -9 of the trainer", killed=("trainer",))


def _damage(root: Path, random: Random, spare: int) -> Path | None:
    """Flip bytes in the largest file of the newest folder, unless fewer than `spare` others would be left."""
    folders = numbered_folders(root) if root.is_dir() else []
    if len(folders) <= spare:
        return None
    try:
        victim = max(folders[-1][1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
        with victim.open("r+b") as file:
            at = random.randrange(victim.stat().st_size // 2, victim.stat().st_size - FLIPPED_BYTES)
            file.seek(at)
            flipped = bytes(byte ^ 0xFF for byte in file.read(FLIPPED_BYTES))
            file.seek(at)
            file.write(flipped)
    except (OSError, ValueError):
        return None
    return victim


STORAGE = (
    Fault("disk full", _full),
    Fault("weights damaged", _weights_damaged),
    Fault("checkpoint damaged", _checkpoint_damaged),
)
