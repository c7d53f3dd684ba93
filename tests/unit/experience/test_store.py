"""The store on its own: any fsspec place, whole files, and foreign files that harm nobody."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from ulid import ULID

from spo.client.models import Job, MetricSeries
from spo.demo.demo import DemoOutcome
from spo.demo.experience import RunCost, compare, write_comparison
from spo.errors import IntegrityError, InvalidInput
from spo.experience.columns import ADDED, SCHEMA, StoredTrajectory, table_of
from spo.experience.store import ROW_GROUP_ROWS, ExperienceStore, Origin, StoredFile, merge
from spo.testing.runs import conversation, trajectory
from spo.v1.prompt_pb2 import Prompt
from spo.v1.verdict_pb2 import PartScore
from tests.support.evaluations import step_evaluation
from tests.support.openapi_documents import SCHEMAS, example

ORIGIN = Origin("job_1", "run", "toy", "a" * 64, licence="CC0", parents=("job_0",), tenant="us")


def rows(count: int) -> list[StoredTrajectory]:
    made = [trajectory(number) for number in range(count)]
    return [StoredTrajectory(each, Prompt(prompt_id=each.prompt_id, text="words", task_set="toy")) for each in made]


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_what_is_written_is_read_wherever_the_store_is(place: str, tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path) if place == "folder" else f"memory://{ULID()}")
    given = rows(ROW_GROUP_ROWS + 50)

    path = store.write(ORIGIN, "part-1", given)

    (file,) = store.files()
    assert (file.path, file.origin, file.rows) == (path, ORIGIN, len(given))
    found = [row for batch in store.batches(file) for row in batch]
    by_id = {row.trajectory.trajectory_id: row for row in given}
    assert {row.trajectory.trajectory_id for row in found} == set(by_id)
    assert all(row == by_id[row.trajectory.trajectory_id] for row in found)
    assert store.rows(file, [260, 3]) == [found[260], found[3]]
    assert store.files("job_2") == store.files(task_set="taco") == []
    store.remove(file)
    store.remove(file)
    assert store.files() == []


def test_names_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    root = tmp_path / "some" / "where" / "store"
    store = ExperienceStore(str(root))

    for run, name in (("../up", "part"), ("job_1", "a/b"), ("", "part"), ("job_1", ".hidden")):
        with pytest.raises(InvalidInput):
            store.write(Origin(run, "run", "toy"), name, rows(1))
    store.write(Origin("job_1", "run", "../../etc", "../.."), "part", rows(1))
    assert [path for path in tmp_path.rglob("*.parquet") if not path.is_relative_to(root)] == []
    assert store.files()[0].origin.task_set == "../../etc"


def test_a_url_that_nothing_opens_says_so() -> None:
    with pytest.raises(InvalidInput, match="SPO_EXPERIENCE_URL"):
        ExperienceStore("nosuchscheme://bucket")


def test_readers_meet_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    stop = threading.Event()
    seen: set[int] = set()

    def read() -> None:
        while not stop.is_set():
            seen.update(len(store.table(file, ["trajectory_id"])) for file in store.files())

    reader = threading.Thread(target=read)
    reader.start()
    for count in (100, 200) * 3:
        store.write(ORIGIN, "part-1", rows(count))
    stop.set()
    reader.join(30)

    assert seen <= {100, 200}
    assert not list(tmp_path.rglob(".writing-*"))


def _replaced(column: str, values: Any) -> pyarrow.Table:
    table = table_of(rows(2))
    return table.set_column(table.schema.get_field_index(column), column, values)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"PAR1 or so"),
        lambda path: parquet.write_table(table_of(rows(2)), path),
        lambda path: parquet.write_table(_stamped(table_of(rows(2)).drop_columns(["reward"])), path),
        lambda path: parquet.write_table(_stamped(_replaced("reward", pyarrow.array([{"nested": 1.0}] * 2))), path),
        lambda path: parquet.write_table(_stamped(_replaced("response_text", pyarrow.array([["x"]] * 2))), path),
        lambda path: parquet.write_table(_stamped(table_of(rows(600))), path, row_group_size=100),
    ],
    ids=["garbage", "no format", "a column less", "a struct", "a list", "other row groups"],
)
def test_foreign_files_are_left_out_and_the_rest_is_read(write: Any, tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    good = Path(store.write(ORIGIN, "part-1", rows(3)))
    foreign = good.with_name("part-0.parquet")
    write(foreign)

    assert [file.path for file in store.files()] == [str(good)]
    with pytest.raises(IntegrityError, match="part-0"):
        store.table(StoredFile(str(foreign), ORIGIN, 2, 0, 0), SCHEMA.names)


def _stamped(table: pyarrow.Table) -> pyarrow.Table:
    return table.replace_schema_metadata({"spo_format": "1"})


def test_words_of_a_later_release_are_read_as_unspecified(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    path = Path(store.write(ORIGIN, "part-1", rows(2)))
    for column, word in (("source", "dreamt"), ("outcome", "excellent"), ("finish_reason", "bored")):
        parquet.write_table(_stamped(_replaced(column, pyarrow.array([word] * 2))), path)
        (file,) = store.files()
        (found,) = store.rows(file, [0])
        read = found.trajectory
        assert 0 in (read.source, read.verdict.outcome, read.finish_reason)


def test_scores_and_their_parts_are_kept_and_merged_with_files_from_before_them(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    (scored,) = rows(1)
    scored.trajectory.verdict.score = 0.0
    scored.trajectory.verdict.parts.extend(
        [PartScore(name="format", score=1.0), PartScore(name="style.rhyme", score=0.25)]
    )
    before = Path(store.write(ORIGIN, "part-1", rows(3)))
    store.write(ORIGIN, "part-2", [scored])
    parquet.write_table(_stamped(table_of(rows(3)).drop_columns(["score", "part_names", "part_scores"])), before)

    old, new = store.files()
    assert store.rows(new, [0]) == [scored]
    assert not any(row.trajectory.verdict.HasField("score") for row in store.rows(old, [0, 1, 2]))
    assert store.table(new, ["part_scores"]).to_pylist() == [{"part_scores": [1.0, 0.25]}]
    merge(store, [old, new])
    (merged,) = store.files()
    assert scored in store.rows(merged, range(4))


def test_conversations_keep_their_turns_and_files_from_before_them_are_read_and_merged(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    prompt = Prompt(prompt_id=conversation(7).prompt_id, text="words", environment="retry", environment_json="{}")
    spoken = StoredTrajectory(conversation(7), prompt)
    before = Path(store.write(ORIGIN, "part-1", rows(3)))
    store.write(ORIGIN, "part-2", [spoken])
    parquet.write_table(_stamped(table_of(rows(3)).drop_columns(sorted(ADDED))), before)

    old, new = store.files()
    assert store.rows(new, [0]) == [spoken]
    assert sorted(store.rows(old, [0, 1, 2]), key=_id) == sorted(rows(3), key=_id)
    assert store.table(old, ["segment_tokens", "trajectory_id"]).column_names == ["segment_tokens", "trajectory_id"]
    merge(store, [old, new])
    (merged,) = store.files()
    assert sorted(store.rows(merged, range(4)), key=_id) == sorted([*rows(3), spoken], key=_id)


def _id(row: StoredTrajectory) -> str:
    return row.trajectory.trajectory_id


def _measured(scores: dict[int, float], rollouts: dict[int, int]) -> RunCost:
    evaluations = [step_evaluation(step, {"10": value}) for step, value in scores.items()]
    job = Job.model_validate(example(SCHEMAS["Job"]) | {"state": "succeeded"})
    outcome = DemoOutcome(job, [], evaluations, MetricSeries(), {}, 1, [], 0, {}, 1.0, 2.0, 1.0)
    return RunCost(outcome, rollouts)


def test_the_comparison_counts_rollouts_until_the_first_runs_best(tmp_path: Path) -> None:
    first = _measured({0: 0.3, 20: 0.9, 40: 0.9, 60: 0.8}, {0: 0, 20: 400, 40: 700, 60: 1000})
    second = _measured({0: 0.3, 20: 0.88, 40: 0.91}, {0: 0, 20: 90, 40: 150})

    report = compare(first, second)
    write_comparison(report, first, second, tmp_path)

    assert (report["best_pass_at_10"], report["first"]["best_at_step"]) == (0.9, 20)
    assert (report["second"]["reaches_it_at_step"], report["share_of_rollouts"]) == (40, 150 / 400)
    assert report["promise_held"]
    assert not compare(second, _measured({0: 0.3, 20: 0.9}, {0: 0, 20: 1}))["promise_held"], "never as good"
    assert not compare(first, _measured({20: 0.95}, {20: 201}))["promise_held"], "more than half"
    assert json.loads((tmp_path / "report.json").read_text())["share_of_rollouts"] == 150 / 400
    assert "reached it with 150" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").stat().st_size > 1000
