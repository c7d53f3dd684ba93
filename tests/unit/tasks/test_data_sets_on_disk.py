"""Data sets of the Hugging Face hub on disk: single files, clones with splits, folders of `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import TaskSets
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction

Rows = list[dict[str, Any]]
COLUMNS = {"statement": "question", "answer": "answer"}


def questions(*numbers: int) -> Rows:
    return [{"question": f"Say {number}.", "answer": str(number), "unused": [number]} for number in numbers]


def as_jsonl(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_parquet(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def as_arrow(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return file


def loaded(path: Path, columns: dict[str, str] | None = None, held_out: int = 0, **settings: Any) -> TaskSets:
    described = {"columns": columns or COLUMNS, **settings}
    return load_tasks(
        TasksSpec(kind="huggingface", path=str(path), evaluation_problems=held_out, huggingface=described)  # type: ignore[arg-type]
    )


def statements(tasks: TaskSets) -> list[str]:
    return sorted(problem.statement for problem in tasks.train)


@pytest.mark.parametrize(("write", "name"), [(as_jsonl, "a.jsonl"), (as_parquet, "a.parquet"), (as_arrow, "a.arrow")])
def test_a_file_is_read_by_its_columns_in_every_format(
    tmp_path: Path, write: Callable[[Path, Rows], Path], name: str
) -> None:
    tasks = loaded(write(tmp_path / name, questions(1, 2)))

    assert statements(tasks) == ["Say 1.", "Say 2."]
    (rule,) = {(tuple(each.tests.answer.expected), each.language) for each in tasks.train if "1" in each.statement}
    assert rule == (("1",), "text")


def test_a_clone_of_the_hub_is_read_by_its_splits(tmp_path: Path) -> None:
    as_parquet(tmp_path / "main" / "train-00000-of-00002.parquet", questions(1, 2))
    as_parquet(tmp_path / "main" / "train-00001-of-00002.parquet", questions(3))
    as_parquet(tmp_path / "main" / "test-00000-of-00001.parquet", questions(8, 9))
    (tmp_path / "README.md").write_text("ignored")

    assert statements(loaded(tmp_path)) == ["Say 1.", "Say 2.", "Say 3."]
    assert statements(loaded(tmp_path, split="test")) == ["Say 8.", "Say 9."]
    both = loaded(tmp_path, held_out=2, evaluation_split="test")
    assert sorted(problem.statement for problem in both.evaluation) == ["Say 8.", "Say 9."]
    assert statements(both) == ["Say 1.", "Say 2.", "Say 3."]
    with pytest.raises(InvalidInput, match="the splits test, train, not validation"):
        loaded(tmp_path, split="validation")


def test_a_saved_folder_is_read_with_and_without_splits(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    as_arrow(single / "data-00000-of-00001.arrow", questions(1))
    for file in (single / "dataset_info.json", single / "state.json"):
        file.write_text("{}")
    as_arrow(several / "train" / "data-00000-of-00001.arrow", questions(2))
    as_arrow(several / "test" / "data-00000-of-00001.arrow", questions(3))
    as_arrow(several / "train" / "cache-1234.arrow", questions(7))

    assert statements(loaded(single)) == ["Say 1."]
    assert statements(loaded(several)) == ["Say 2."]
    assert statements(loaded(several, split="test")) == ["Say 3."]


def test_nested_columns_conversations_and_answers_after_a_marker(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": "First 3. So\n#### 12"},
        "level": 5,
    }
    columns = {"statement": "prompt", "answer": "reward_model.ground_truth", "difficulty": "level"}
    answer = {"comparison": "numeric", "extraction": "boxed", "expected_after": "####"}
    file = as_parquet(tmp_path / "a.parquet", [row])

    (problem,) = loaded(file, columns, answer=answer, instruction="Put it into \\boxed{}.").train

    assert problem.statement == "How many?\n\nPut it into \\boxed{}."
    assert list(problem.tests.answer.expected) == ["12"]
    assert problem.tests.answer.comparison == AnswerComparison.ANSWER_COMPARISON_NUMERIC
    assert problem.tests.answer.extraction == AnswerExtraction.ANSWER_EXTRACTION_BOXED
    assert problem.difficulty == "5"


def test_columns_of_code_and_of_programs(tmp_path: Path) -> None:
    code = {"text": "Write f.", "test_list": ["assert f(1) == 2", "assert f(2) == 4"], "setup": "import math"}
    columns = {"statement": "text", "code": "test_list", "before": "setup"}
    (problem,) = loaded(as_jsonl(tmp_path / "code.jsonl", [code]), columns).train
    assert problem.tests.code_tests.code == "assert f(1) == 2\nassert f(2) == 4"
    assert problem.tests.code_tests.before == "import math"

    program = {"text": "Double it.", "in": ["1", "2"], "out": ["2", 4], "best": "print(2 * int(input()))"}
    columns = {"statement": "text", "inputs": "in", "outputs": "out", "solutions": "best"}
    (problem,) = loaded(as_jsonl(tmp_path / "program.jsonl", [program]), columns).train
    assert [(test.stdin, test.stdout) for test in problem.tests.tests] == [(b"1", b"2"), (b"2", b"4")]
    assert problem.human_solutions == ("print(2 * int(input()))",)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "x"}, ["there is no column answer; it has question"]),
        ({"answer": [["1"]], "question": 3}, ["column question is neither text", "column answer holds neither text"]),
        ({"question": "x", "answer": None}, ["column answer is null"]),
        ({"question": "x", "answer": " "}, ["answer: an expected answer is blank"]),
        ({"question": [{"role": "system", "content": "x"}], "answer": "1"}, ["column question is neither text"]),
    ],
)
def test_rows_that_lack_what_the_columns_name_are_told_with_their_numbers(
    tmp_path: Path, row: dict[str, Any], told: list[str]
) -> None:
    file = as_jsonl(tmp_path / "a.jsonl", [*questions(1), row])

    with pytest.raises(InvalidInput) as caught:
        loaded(file)

    messages = [fault.message for fault in caught.value.violations]
    assert [message.startswith(f"{file}, line 2: {start}") for message, start in zip(messages, told, strict=True)] == [
        True for _ in told
    ]


def test_a_folder_or_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidInput, match=str(path)):
            loaded(path)


def test_only_so_many_rows_are_read(tmp_path: Path) -> None:
    file = as_jsonl(tmp_path / "a.jsonl", [*questions(1, 2), {"question": 3}])
    assert statements(loaded(file, limit=2)) == ["Say 1.", "Say 2."]


@pytest.mark.parametrize(
    "files",
    [
        {"main": "main/train-00000-of-00001.jsonl", "socratic": "socratic/train-00000-of-00001.jsonl"},
        {"easy": "data/easy/train.jsonl", "hard": "data/hard/train.jsonl"},
        {"easy": "easy/train/0000.jsonl", "hard": "hard/train/0000.jsonl"},
        {"en": "en/train.jsonl", "de": "de/train_more.jsonl"},
        {"that of the top": "train.jsonl", "extra": "extra/train.jsonl"},
    ],
)
def test_configurations_of_a_clone_are_not_mixed(tmp_path: Path, files: dict[str, str]) -> None:
    for number, file in enumerate(files.values()):
        as_jsonl(tmp_path / file, questions(number))

    with pytest.raises(InvalidInput, match="several configurations") as caught:
        loaded(tmp_path)
    named = list(files)[1]
    assert (caught.value.code, caught.value.violations[0].pointer) == ("several_configurations", "/tasks/path")
    assert named in caught.value.message
    assert statements(loaded((tmp_path / files[named]).parent)) == ["Say 1."]


def test_folders_of_a_split_and_of_its_shards_are_one_configuration(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", questions(1))
    as_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", questions(2))
    as_arrow(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow", questions(3))
    as_arrow(tmp_path / "saved" / "test" / "data-00000-of-00001.arrow", questions(4))

    assert statements(loaded(tmp_path / "data")) == ["Say 1.", "Say 2."]
    assert statements(loaded(tmp_path / "saved")) == ["Say 3."]
