"""Older events of jobs in files below the state folder, so that neither Redis nor a restart grows with a job's age.

A file holds SEGMENT events as JSON lines; its number says which. Events never change, so whoever writes a file writes
the same bytes: it may be written twice, also by an orchestrator that leads no more. Events leave Redis only after that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from services.orchestrator.jobs.events import JobEvent
from spo.errors import IntegrityError
from spo.spec.stored import record_from_json

SEGMENT = 1000


def last_of_segment(seq: int) -> int:
    """The last sequence number of the file that holds this one."""
    return ((seq - 1) // SEGMENT + 1) * SEGMENT


class EventFiles:
    """`<job>/<number of the file>.jsonl` below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, job_id: str, events: Sequence[JobEvent]) -> None:
        """Write one whole file, safe on disk when this returns. Raises OSError; IntegrityError on a hole."""
        first, last = events[0].seq, events[-1].seq
        whole = list(range(last - SEGMENT + 1, last + 1))
        if last != last_of_segment(first) or [event.seq for event in events] != whole:
            raise IntegrityError(f"the events {first} to {last} of {job_id} are not a whole file of {SEGMENT}")
        place = self._file(job_id, first)
        place.parent.mkdir(parents=True, exist_ok=True)
        staging = place.with_suffix(f".{os.getpid()}")
        with staging.open("w") as file:
            file.writelines(json.dumps(asdict(event)) + "\n" for event in events)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(place)
        descriptor = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, job_id: str, after_seq: int, limit: int) -> list[JobEvent]:
        """Events after a sequence number, oldest first, as far as files have them."""
        found: list[JobEvent] = []
        while len(found) < limit:
            seq = found[-1].seq if found else after_seq
            try:
                lines = self._file(job_id, seq + 1).read_text().splitlines()
            except FileNotFoundError:
                break
            events = [record_from_json(JobEvent, line) for line in lines[seq % SEGMENT :]]
            found += events[: limit - len(found)]
        return found

    def remove(self, job_id: str) -> None:
        """Remove what there is of a job."""
        shutil.rmtree(self.folder / job_id, ignore_errors=True)

    def _file(self, job_id: str, seq: int) -> Path:
        return self.folder / job_id / f"{(seq - 1) // SEGMENT:08d}.jsonl"
