"""Trajectories of a run that have left Redis, read from the experience store, for people and for their values.

They lack what is not stored: the hops, and a verdict's detail and CPU time. Copies of another run's experience are
stored under that run only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spo.experience.store import ExperienceStore, StoredFile
from spo.v1.trajectory_pb2 import Trajectory

NARROW = ("trajectory_id", "prompt_id", "source", "created_unix_ms")
# Listing a run opens every file of it; what was listed is good for a while, as files only come.
LISTED_SECONDS = 15.0
LISTED_RUNS = 8
FILES_PER_PAGE = 8


@dataclass(frozen=True)
class ArchivedPage:
    """Trajectories and where the next page begins, "" at the end."""

    trajectories: list[Trajectory]
    cursor: str


class ArchivedTrajectories:
    """What the experience store holds of runs."""

    def __init__(self, store: ExperienceStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[float, list[StoredFile]]] = {}

    def find(self, run_id: str, trajectory_ids: Sequence[str]) -> dict[str, Trajectory]:
        """Those of these trajectories that are stored, by id. Raises Unreachable, IntegrityError."""
        wanted, found = set(trajectory_ids), dict[str, Trajectory]()
        for file in reversed(self._files(run_id)):
            if len(found) == len(wanted):
                break
            ids = self.store.table(file, ("trajectory_id",))["trajectory_id"].to_pylist()
            numbers = [number for number, stored in enumerate(ids) if stored in wanted]
            found |= {row.trajectory.trajectory_id: row.trajectory for row in self.store.rows(file, numbers)}
        return found

    def page(self, run_id: str, prompt_id: str, source: str, cursor: str, limit: int) -> ArchivedPage:
        """A page of a run's stored trajectories, newest file first; empty filters ask nothing.

        cursor: "" for the first page, else what the page before said. A page may hold fewer than `limit`.
        """
        files = self._files(run_id)
        number, passed = map(int, cursor.split("-")) if cursor else (len(files) - 1, 0)
        found: list[Trajectory] = []
        for _ in range(FILES_PER_PAGE):
            if not 0 <= number < len(files):
                return ArchivedPage(found, "")
            rows = self._matching(files[number], prompt_id, source)
            taken = rows[passed : passed + limit - len(found)]
            by_id = {row.trajectory.trajectory_id: row.trajectory for row in self.store.rows(files[number], taken)}
            ordered = sorted(by_id.values(), key=lambda trajectory: -trajectory.created_unix_ms)
            found += ordered
            passed += len(taken)
            if passed >= len(rows):
                number, passed = number - 1, 0
            if len(found) == limit:
                break
        return ArchivedPage(found, f"{number}-{passed}" if number >= 0 else "")

    def _matching(self, file: StoredFile, prompt_id: str, source: str) -> list[int]:
        """Numbers of the rows that pass the filters, the newest first."""
        columns = self.store.table(file, NARROW).to_pylist()
        numbers = [
            number
            for number, row in enumerate(columns)
            if prompt_id in ("", row["prompt_id"]) and source in ("", row["source"])
        ]
        return sorted(numbers, key=lambda number: -columns[number]["created_unix_ms"])

    def _files(self, run_id: str) -> list[StoredFile]:
        """The run's own files in the order in which they were written."""
        with self._lock:
            at, files = self._listed.pop(run_id, (float("-inf"), []))
            if time.monotonic() - at > LISTED_SECONDS:
                at = time.monotonic()
                found = [file for file in self.store.files(run_id) if file.origin.kind == "run"]
                # Their names say which insertion numbers they hold.
                files = sorted(found, key=lambda file: (file.name, file.path))
            self._listed[run_id] = at, files
            for oldest in list(self._listed)[:-LISTED_RUNS]:
                del self._listed[oldest]
            return files
