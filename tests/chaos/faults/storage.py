"""Disks: full, read-only, broken or vanished for a while, and the newest weights or checkpoint with flipped bytes."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from spo.local.launcher import SERVICES
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


def _refused(numbers: Sequence[int], stage: Stage, random: Random) -> Inflicted | None:
    """Of a mount that all share everybody's writes, of a broken one all that a service does."""
    storage = stage.platform.storage
    if not storage.works:
        return None
    number, seconds = random.choice(numbers), random.uniform(5, 10)
    can_read = number == errno.EROFS
    names = SERVICES if can_read else (random.choice(SERVICES),)
    for name in names:
        storage.set(name, number, can_read=can_read)

    def mount() -> None:
        for name in names:
            storage.set(name, 0)

    who = "everybody" if can_read else names[0]
    return Inflicted(f"the state folder answers {who} {errno.errorcode[number]} for {seconds:.1f} s", seconds, mount)


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
    Fault("storage read-only", partial(_refused, (errno.EROFS,))),
    Fault("storage broken", partial(_refused, (errno.EIO,))),
    Fault("storage away", partial(_refused, (errno.ESTALE, errno.EACCES))),
    Fault("weights damaged", _weights_damaged),
    Fault("checkpoint damaged", _checkpoint_damaged),
)
