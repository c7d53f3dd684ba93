"""Many small files become few: every row is read once before, during and after, wherever the merge is cut short."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.orchestrator.stored_experience import RowFilter, Scope, every_row
from spo.experience.columns import StoredTrajectory
from spo.experience.store import LEASE_SECONDS, MERGED_ROWS, ExperienceStore, Origin, StoredFile, merge, plan
from spo.testing.runs import trajectory
from spo.v1.prompt_pb2 import Prompt

ORIGIN = Origin("job_1", "run", "toy", "a" * 64, licence="CC0", parents=("job_0",), tenant="us")


class Killed(Exception):
    pass


class Dying(ExperienceStore):
    """Dies before it removes the file with this number."""

    removals = 0
    dies_at = 0

    def remove(self, file: StoredFile) -> None:
        if self.removals == self.dies_at:
            raise Killed
        self.removals += 1
        super().remove(file)


def rows(*numbers: int) -> list[StoredTrajectory]:
    made = [trajectory(number) for number in numbers]
    return [StoredTrajectory(each, Prompt(prompt_id=each.prompt_id, text="words", task_set="toy")) for each in made]


def fill(store: ExperienceStore, files: int, origin: Origin = ORIGIN) -> None:
    for number in range(files):
        store.write(origin, f"part-{number:03d}", rows(*range(number * 10, number * 10 + 10)))


def ids(store: ExperienceStore) -> list[str]:
    return sorted(
        row.trajectory.trajectory_id for file in store.files() for found in store.batches(file) for row in found
    )


def test_small_files_become_one_with_the_same_rows_and_lineage(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 12)
    before, newest = ids(store), max(file.written_unix_ms for file in store.files())
    given = {row.trajectory.trajectory_id: row for row in rows(*range(120))}

    (quota,) = plan(store.files())
    merge(store, quota)

    (file,) = store.files()
    assert (file.origin, file.rows, file.written_unix_ms) == (ORIGIN, 120, newest)
    found = [row for batch in store.batches(file) for row in batch]
    assert ids(store) == before
    assert all(row == given[row.trajectory.trajectory_id] for row in found)
    prompts = [row.prompt.prompt_id for row in found]
    assert prompts == sorted(prompts), "one prompt's rows lie together"
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert plan(store.files()) == [], "nothing is left to do"


@pytest.mark.parametrize("dies_at", [0, 1, 4])
def test_a_merge_that_is_cut_short_doubles_nothing_and_the_next_one_ends_it(tmp_path: Path, dies_at: int) -> None:
    store = Dying(str(tmp_path))
    store.dies_at = dies_at
    fill(store, 5)
    before = ids(store)
    with pytest.raises(Killed):
        merge(store, plan(store.files())[0])

    survivor = ExperienceStore(str(tmp_path))

    assert ids(survivor) == before
    assert len(survivor.superseded()) == 5 - dies_at
    for file in survivor.superseded():
        survivor.remove(file)
    assert (ids(survivor), survivor.superseded()) == (before, [])


def test_a_part_that_comes_back_after_its_merge_does_not_count_twice(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 3)
    before = ids(store)
    merge(store, store.files())
    store.write(ORIGIN, "part-003", rows(30))
    merge(store, store.files())

    fill(store, 1)

    assert ids(store) == sorted([*before, "traj_SOURCE_ONLINE_30"])


def test_only_files_of_one_origin_are_merged_and_no_file_grows_beyond_the_limit(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 2)
    fill(store, 2, Origin("job_2", "run", "toy", "a" * 64))
    fill(store, 1, Origin("theirs", "import", "toy"))

    assert sorted([file.origin.run for file in quota] for quota in plan(store.files())) == [
        ["job_1", "job_1"],
        ["job_2", "job_2"],
    ]
    large = [StoredFile(f"run/part-{number}.parquet", ORIGIN, MERGED_ROWS // 2, 1000, 0) for number in range(5)]
    assert [len(quota) for quota in plan(large)] == [2, 2]


def test_what_was_listed_before_a_merge_is_read_to_its_end_and_removed_by_the_next(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 4)
    before = ids(store)
    with store.snapshot() as go_on:
        listed = store.files()
        merge(ExperienceStore(str(tmp_path)), listed)
        go_on()
        read = sorted(row.trajectory.trajectory_id for file in listed for found in store.batches(file) for row in found)
        assert read == before
        assert ids(store) == before, "and who lists now reads each row once"
        assert len(store.superseded()) == 4
    assert not store.is_read()
    assert ids(store) == before


@pytest.mark.parametrize("silent_seconds", [LEASE_SECONDS + 1, LEASE_SECONDS * 10])
def test_a_snapshot_of_a_reader_that_died_ends_by_itself(
    silent_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 2)
    reader = store.snapshot()
    reader.__enter__()
    assert store.is_read()
    later = time.time() + silent_seconds
    monkeypatch.setattr("spo.experience.store.time.time", lambda: later)
    merge(store, store.files())
    assert store.superseded() == []
    assert list((tmp_path / ".reading").iterdir()) == []


def test_a_snapshot_lasts_while_its_reader_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 2)
    began = time.time()
    with store.snapshot() as go_on:
        for number in range(1, 5):
            monkeypatch.setattr("spo.experience.store.time.time", lambda at=began + number * LEASE_SECONDS * 0.6: at)
            go_on()
            assert store.is_read()
    assert not store.is_read()


def test_an_export_survives_a_compaction_in_its_middle(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    fill(store, 4)
    everything = every_row(store, Scope(None, None, None), RowFilter())
    found = [next(everything).trajectory.trajectory_id]
    merge(store, store.files())
    found += [row.trajectory.trajectory_id for row in everything]
    assert sorted(found) == ids(store)
