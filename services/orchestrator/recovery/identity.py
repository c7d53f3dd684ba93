"""Whose data Redis holds: an epoch in Redis and the same one in files beside what the jobs left.

Redis without an epoch, while a file has one, has lost its data; another epoch is that of another platform, or of a
backup from before a loss. Whatever is found is told and written down, and the platform goes on under one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from ulid import ULID

from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.recovery.files import read_json, write_json
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.service.state_place import StateFolder, StatePlace
from spo.spec.stored import record_of

log = get_logger("identity")

FILE = "platform.json"
MOST_LOSSES = 100

LossKind = Literal["redis_emptied", "redis_behind", "other_redis", "state_emptied", "weights_replaced"]

_WORDS: dict[str, str] = {
    "redis_emptied": "Redis came back without its data: the records of the jobs, API keys, datasets, values and the "
    "replay buffers are lost; weights, checkpoints and stored experience are on disk",
    "redis_behind": "Redis came back with older data: what was written last is lost",
    "other_redis": "Redis holds the data of another platform than the state folder",
    "state_emptied": "the state folder came back empty: checkpoints, datasets and manifests of jobs are lost",
    "weights_replaced": "the folder of weights belongs to another platform",
}


@dataclass(frozen=True)
class RecordedLoss:
    """What was found, RFC 3339 when; `epoch` is the one that it ended."""

    at: str
    kind: LossKind
    message: str
    epoch: str = ""
    acknowledged: bool = False


@dataclass(frozen=True)
class _Known:
    """What the file in the state folder holds."""

    epoch: str = ""
    earlier: list[str] = field(default_factory=list)
    losses: list[dict[str, object]] = field(default_factory=list)


class PlatformIdentity:
    """Compares the epochs; used by one orchestrator at a time."""

    def __init__(self, client: RedisClient, place: StatePlace, weight_place: str) -> None:
        self.client = client
        self.place = place
        self.weights = None if "://" in weight_place else Path(weight_place)

    def check(self) -> RecordedLoss | None:
        """Compare and make equal; what was lost, if anything was. Raises redis.RedisError, OSError, Unreachable."""
        known = self._known()
        stored = self.client.hget(redis_keys.platform(), "epoch")
        found = stored.decode() if stored else ""
        loss = self._difference(known, found)
        if loss is None and found and known.epoch == found:
            return self._check_weights(known)
        epoch = str(ULID()) if not found or (loss and loss.kind == "redis_behind") else found
        earlier = [each for each in dict.fromkeys([*known.earlier, known.epoch]) if each and each != epoch]
        self._write(_Known(epoch, earlier, known.losses), loss)
        # After the file: whoever is cut short in between finds the same difference again.
        self.client.hset(redis_keys.platform(), "epoch", epoch)
        return loss

    @property
    def epoch(self) -> str:
        """The epoch as the state folder has it; "" before the first check."""
        return self._known().epoch

    @property
    def begun_unix_ms(self) -> int:
        """When the first epoch that the state folder knows of began; after all jobs before the first check."""
        known = self._known()
        epochs = [each for each in (*known.earlier, known.epoch) if each]
        return min((ULID.from_str(each).milliseconds for each in epochs), default=1 << 48)

    def losses(self) -> list[RecordedLoss]:
        """What was ever found, newest first."""
        return [record_of(RecordedLoss, each) for each in reversed(self._known().losses)]

    def tell(self, kind: LossKind, detail: str = "") -> RecordedLoss:
        """Write down a loss that was found elsewhere."""
        known = self._known()
        loss = _loss(kind, known.epoch, detail)
        self._write(known, loss)
        return loss

    def acknowledge(self) -> None:
        """Somebody has seen what was lost; it stays in the list."""
        known = self._known()
        if any(not each.get("acknowledged") for each in known.losses):
            self._write(replace(known, losses=[{**each, "acknowledged": True} for each in known.losses]), None)

    def _difference(self, known: _Known, found: str) -> RecordedLoss | None:
        if known.epoch and not found:
            return _loss("redis_emptied", known.epoch)
        if known.epoch and found != known.epoch:
            return _loss("redis_behind" if found in known.earlier else "other_redis", known.epoch)
        if found and not known.epoch and self.client.zcard(redis_keys.job_index()):
            return _loss("state_emptied", found)
        return None

    def _check_weights(self, known: _Known) -> RecordedLoss | None:
        """The same mark beside the weights, where they lie in a folder."""
        if self.weights is None or not self.weights.is_dir():
            return None
        beside = StateFolder(self.weights)
        mark = str(read_json(beside, FILE).get("epoch", ""))
        if mark == known.epoch:
            return None
        write_json(beside, FILE, {"epoch": known.epoch})
        if not mark or mark in known.earlier:
            return None
        return self.tell("weights_replaced")

    def _known(self) -> _Known:
        return record_of(_Known, read_json(self.place, FILE))

    def _write(self, known: _Known, loss: RecordedLoss | None) -> None:
        losses = known.losses
        if loss:
            log.error("data was lost", kind=loss.kind, what=loss.message, epoch=loss.epoch)
            losses = [*losses, asdict(loss)][-MOST_LOSSES:]
        write_json(self.place, FILE, asdict(replace(known, losses=losses)))


def _loss(kind: LossKind, epoch: str, detail: str = "") -> RecordedLoss:
    message = _WORDS[kind] + (f" ({detail})" if detail else "")
    return RecordedLoss(timestamp(), kind, message, epoch)


def newest_open(losses: Sequence[RecordedLoss]) -> RecordedLoss | None:
    """The latest loss that nobody has acknowledged."""
    return next((loss for loss in losses if not loss.acknowledged), None)
