"""Older events of jobs in files of the state place, so that neither Redis nor a restart grows with a job's age.

A file holds SEGMENT events as JSON lines; its number says which. Events never change, so whoever writes a file writes
the same bytes: it may be written twice, also by an orchestrator that leads no more. Events leave Redis only after that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from services.orchestrator.jobs.events import JobEvent
from spo.errors import IntegrityError
from spo.service.state_place import StatePlace
from spo.spec.stored import record_from_json

SEGMENT = 1000


def last_of_segment(seq: int) -> int:
    """The last sequence number of the file that holds this one."""
    return ((seq - 1) // SEGMENT + 1) * SEGMENT


class EventFiles:
    """`events/<job>/<number of the file>.jsonl`."""

    def __init__(self, place: StatePlace) -> None:
        self.place = place

    def write(self, job_id: str, events: Sequence[JobEvent]) -> None:
        """Write one whole file, safe when this returns. Raises OSError, Unreachable; IntegrityError on a hole."""
        first, last = events[0].seq, events[-1].seq
        whole = list(range(last - SEGMENT + 1, last + 1))
        if last != last_of_segment(first) or [event.seq for event in events] != whole:
            raise IntegrityError(f"the events {first} to {last} of {job_id} are not a whole file of {SEGMENT}")
        lines = "".join(json.dumps(asdict(event)) + "\n" for event in events)
        self.place.write(self._name(job_id, first), lines.encode())

    def read(self, job_id: str, after_seq: int, limit: int) -> list[JobEvent]:
        """Events after a sequence number, oldest first, as far as files have them."""
        found: list[JobEvent] = []
        while len(found) < limit:
            seq = found[-1].seq if found else after_seq
            content = self.place.read(self._name(job_id, seq + 1))
            if content is None:
                break
            lines = content.decode().split("\n")[:-1]
            events = [record_from_json(JobEvent, line) for line in lines[seq % SEGMENT :]]
            found += events[: limit - len(found)]
        return found

    def remove(self, job_id: str) -> None:
        """Remove what there is of a job. Raises OSError, Unreachable."""
        self.place.remove_folder(f"events/{job_id}")

    def _name(self, job_id: str, seq: int) -> str:
        return f"events/{job_id}/{(seq - 1) // SEGMENT:08d}.jsonl"
