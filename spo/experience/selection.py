"""Which stored trajectories a new job takes for a prompt."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypedDict

import pyarrow
from pyarrow import compute

from spo.errors import SpoError
from spo.experience.columns import SCHEMA, StoredTrajectory, statement_digest
from spo.experience.store import ExperienceStore, StoredFile
from spo.spec.experience import StoredExperience
from spo.spec.reward import is_success
from spo.v1.prompt_pb2 import Prompt

# What the choice depends on; all else is read for the chosen rows only.
NARROW = ("trajectory_id", "prompt_id", "statement_digest", "content_digest", "reward", "outcome", "created_unix_ms")
# What people said of their answers: nine who like a text and one who does not are ten opinions, not two.
OPINIONS = "traffic"
_PLACE = [("file", pyarrow.int32()), ("row", pyarrow.int32())]
_EMPTY = pyarrow.schema([*(SCHEMA.field(name) for name in NARROW), *_PLACE]).empty_table()


class IndexRow(TypedDict):
    """A row of the index: the columns of NARROW, and where the whole row is."""

    trajectory_id: str
    prompt_id: str
    statement_digest: str
    content_digest: str
    reward: float | None
    outcome: str | None
    created_unix_ms: int
    file: int
    row: int


class Selection:
    """The stored experience that a job names, looked through once and then asked prompt by prompt.

    `tenant` keeps to what one tenant stored; `job_id` leaves out what the job itself has stored meanwhile.
    """

    def __init__(
        self, store: ExperienceStore, wanted: Sequence[StoredExperience], *, job_id: str = "", tenant: str = ""
    ) -> None:
        self.store = store
        self.wanted = wanted
        self.job_id = job_id
        self.tenant = tenant
        self._known: tuple[pyarrow.Table, list[StoredFile]] | None = None
        self._lock = threading.Lock()

    def of(self, prompt: Prompt) -> list[StoredTrajectory]:
        """At most `per_prompt` trajectories for each source named: successes and failures in turn, newest first.

        Those on this very prompt, and those on the same statement with other tests, whose verdicts do not count here.
        None twice by id, nor by content and outcome, except captured traffic: there each is an opinion. Raises
        Unreachable, IntegrityError.
        """
        with self._lock:
            index, files = self._known = self._known or self._look()
        same = compute.or_(
            compute.equal(index["prompt_id"], prompt.prompt_id),
            compute.equal(index["statement_digest"], statement_digest(prompt.text)),
        )
        found: list[IndexRow] = index.filter(same).to_pylist()
        found.sort(key=lambda row: (row["created_unix_ms"], row["trajectory_id"]), reverse=True)
        chosen = {row["trajectory_id"]: row for wanted in self.wanted for row in _choose(found, wanted, files)}
        numbers: dict[int, list[int]] = defaultdict(list)
        for row in chosen.values():
            numbers[row["file"]].append(row["row"])
        try:
            return [stored for file, rows in numbers.items() for stored in self.store.rows(files[file], rows)]
        except SpoError:
            # A file was pruned meanwhile: the next try looks again at what there is.
            with self._lock:
                self._known = None
            raise

    def _look(self) -> tuple[pyarrow.Table, list[StoredFile]]:
        """The index of all rows that may be taken, and the files it points into."""
        runs = {wanted.run for wanted in self.wanted}
        found = [file for run in sorted(runs, key=str) for file in self.store.files(None if None in runs else run)]
        mine = (file for file in found if file.origin.run != self.job_id and file.origin.tenant == self.tenant)
        files = list({file.path: file for file in mine}.values())
        tables = []
        for number, file in enumerate(files):
            table = self.store.table(file, NARROW)
            place = ([number] * len(table), range(len(table)))
            for (name, kind), values in zip(_PLACE, place, strict=True):
                table = table.append_column(name, pyarrow.array(values, kind))
            tables.append(table.replace_schema_metadata())
        return pyarrow.concat_tables([_EMPTY, *tables]), files


def _choose(found: Sequence[IndexRow], wanted: StoredExperience, files: Sequence[StoredFile]) -> list[IndexRow]:
    of_run = [row for row in found if wanted.run in (None, files[row["file"]].origin.run)]
    distinct: dict[tuple[str, bool], IndexRow] = {}
    for row in of_run:
        success = is_success(row["reward"], outcome=row["outcome"])
        is_opinion = row["outcome"] is None and files[row["file"]].origin.kind == OPINIONS
        distinct.setdefault((row["trajectory_id"] if is_opinion else row["content_digest"], success), row)
    right = [row for (_, success), row in distinct.items() if success]
    wrong = [row for (_, success), row in distinct.items() if not success and not wanted.correct_only]
    in_turn = chain.from_iterable(zip_longest(right, wrong))
    return [row for row in in_turn if row is not None][: wanted.per_prompt]
