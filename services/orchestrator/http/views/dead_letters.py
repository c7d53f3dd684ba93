"""Dead letters of a job, or of no job, as documents."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from itertools import islice

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message

from services.orchestrator.lifecycle.dead_letters import streams_of
from services.orchestrator.lifecycle.pipeline import SHARED_STREAMS
from services.orchestrator.schemas.dead_letters import (
    DeadLetterDetail,
    DeadLetterPage,
    DeadLetterSummary,
    DeadLetterTotals,
)
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import dead_letters
from spo.messaging.streams.dead_letters import DeadLetter
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest

# What an entry of a stream is.
MESSAGES: dict[str, type[Message]] = {
    "prompts": PromptGroup,
    "rollouts": RolloutGroup,
    "verifier_rollouts": RolloutGroup,
    "verdicts": RolloutGroup,
    "estimates": EstimateRequest,
    "pivotal": PivotalRequest,
}
# Larger messages are only shown by the beginning of their bytes.
MAX_SHOWN_BYTES = 4 << 20
MAX_BASE64_BYTES = 64 << 10


@dataclass(frozen=True)
class DeadLetters:
    """The dead letters of a job; run_id "": of entries that name no job. A letter's id names its stream."""

    client: RedisClient
    run_id: str

    @property
    def streams(self) -> dict[str, str]:
        """The streams whose letters are looked at, by name."""
        if self.run_id:
            return streams_of(self.run_id)
        return {name: stream for name, (stream, _) in SHARED_STREAMS.items()}

    def page(self, stream: str, limit: int, cursor: str) -> DeadLetterPage:
        """The newest letters of one stream, or of all one after the other."""
        names = [name for name in self.streams if stream in ("", name)]
        at, before = cursor.split("-", 1) if cursor else ("", "")
        if at in names:
            names = names[names.index(at) :]
        letters = (
            _summary(name, letter)
            for name in names
            for letter in dead_letters.newest(
                self.client, self.streams[name], self.run_id, before if name == at else ""
            )
        )
        found = list(islice(letters, limit))
        next_cursor = found[-1].id if len(found) == limit else None
        return DeadLetterPage(items=found, totals=self._totals(), next_cursor=next_cursor)

    def detail(self, letter_id: str) -> DeadLetterDetail:
        """One letter with what it says. Raises NotFound."""
        name, letter, payload = self._find(letter_id)
        return DeadLetterDetail(
            **_summary(name, letter).model_dump(),
            message=_decoded(name, payload),
            payload_base64=base64.b64encode(payload[:MAX_BASE64_BYTES]).decode(),
        )

    def redrive(self, letter_id: str) -> bool:
        """Put an entry back on its stream; False when it is no letter any more. Raises NotFound for a deleted job."""
        try:
            _, letter, _ = self._find(letter_id)
        except NotFound:
            return False
        return dead_letters.redrive(self.client, letter)

    def drop(self, letter_id: str) -> None:
        """Forget a letter. Raises NotFound."""
        _, letter, _ = self._find(letter_id)
        dead_letters.drop(self.client, letter.stream, [letter.letter_id])

    def _find(self, letter_id: str) -> tuple[str, DeadLetter, bytes]:
        name, entry_id = letter_id.split("-", 1)
        if name not in self.streams:
            raise NotFound(f"there is no dead letter {letter_id}", code="dead_letter_not_found")
        letter, payload = dead_letters.find(self.client, self.streams[name], entry_id, self.run_id)
        return name, letter, payload

    def _totals(self) -> dict[str, DeadLetterTotals]:
        counts = dead_letters.counts_of(self.client, self.run_id) if self.run_id else {}
        return {
            name: DeadLetterTotals(
                given_up=counts[stream].count if stream in counts else 0,
                gone=dead_letters.gone_of(self.client, stream),
            )
            for name, stream in self.streams.items()
        }


def _summary(name: str, letter: DeadLetter) -> DeadLetterSummary:
    return DeadLetterSummary(
        id=f"{name}-{letter.letter_id}",
        stream=name,
        job_id=letter.run_id or None,
        reason=letter.reason,
        deliveries=letter.deliveries,
        at_unix_ms=letter.at_unix_ms,
        size_bytes=letter.size_bytes,
    )


def _decoded(name: str, payload: bytes) -> dict[str, object] | None:
    if len(payload) > MAX_SHOWN_BYTES:
        return None
    try:
        return dict(MessageToDict(MESSAGES[name].FromString(payload), preserving_proto_field_name=True))
    except (DecodeError, ValueError):
        return None
