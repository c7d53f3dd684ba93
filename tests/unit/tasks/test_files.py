"""Task files in the published schemas, made here: what is read, and how malformed rows are named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from spo.errors import InvalidInput
from spo.model.chat import USUAL
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, extract_program, program_of, write_response
from spo.tasks.records import read_jsonl
from spo.tasks.sources import read_code_contests, read_taco
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment, Trajectory
from spo.v1.verdict_pb2 import CHECKER_FLOAT, CHECKER_SPECIAL, CHECKER_TOKENS

Row = dict[str, Any]


def code_contests_row(number: int = 0) -> Row:
    return {
        "name": f"{number}_A. Sum",
        "description": f"Problem {number}: print the sum of two integers.",
        "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
        "private_tests": {"input": ["5 5\n"], "output": ["10\n"]},
        "generated_tests": {"input": ["0 0\n", "-1 1\n"], "output": ["0\n", "0\n"]},
        "source": 2,
        "difficulty": 7,
        "solutions": {"language": [2, 3, 3, 1], "solution": ["int main(){}", "print(3)", "print(3)", "print 3"]},
        "incorrect_solutions": {"language": [3], "solution": ["print(4)"]},
        "cf_contest_id": 1,
        "cf_index": "A",
        "cf_points": 0.0,
        "cf_rating": 800,
        "cf_tags": ["math"],
        "is_description_translated": False,
        "untranslated_description": "",
        "time_limit": {"seconds": 1, "nanos": 500_000_000},
        "memory_limit_bytes": 64_000_000,
        "input_file": "",
        "output_file": "",
    }


def taco_row(number: int = 0) -> Row:
    return {
        "question": f"Problem {number}: print half of an integer.",
        "solutions": json.dumps(["print(int(input())/2)"]),
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["1\n", ["3"]], "outputs": ["0.5\n", ["1.5"]]}),
        "difficulty": "MEDIUM_HARD",
        "raw_tags": "['Math']",
        "name": None,
        "source": "codeforces",
        "tags": "[]",
        "skill_types": "[]",
        "url": None,
        "Expected Auxiliary Space": None,
        "time_limit": "2.5 seconds",
        "date": None,
        "picture_num": "0",
        "memory_limit": "256.0 megabytes",
        "Expected Time Complexity": None,
    }


def own_row(number: int = 0) -> Row:
    return {"statement": f"Print {number}.", "tests": [{"stdin": "", "stdout": f"{number}\n", "public": True}]}


def write_jsonl(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_parquet(file: Path, rows: list[Row]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def write_arrow(file: Path, rows: list[Row]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return file


FORMATS = [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet"), (write_arrow, "a.arrow")]


@pytest.mark.parametrize(("write", "name"), FORMATS)
def test_code_contests_is_read_in_every_format(
    tmp_path: Path, write: Callable[[Path, list[Row]], Path], name: str
) -> None:
    (problem,) = read_code_contests(write(tmp_path / name, [code_contests_row()]))
    assert problem.statement.startswith("Problem 0: print the sum of two integers.")
    assert "```python" in problem.statement
    assert [(test.stdin, test.stdout, test.public) for test in problem.tests.tests] == [
        (b"1 2\n", b"3\n", True),
        (b"5 5\n", b"10\n", False),
        (b"0 0\n", b"0\n", False),
        (b"-1 1\n", b"0\n", False),
    ]
    assert problem.tests.limits.cpu_seconds == 1.5
    assert problem.tests.limits.memory_bytes == 64_000_000
    assert problem.tests.checker == CHECKER_TOKENS
    assert problem.human_solutions == ("print(3)",)
    assert problem.wrong_solutions == ("print(4)",)
    assert problem.difficulty == "A"
    assert problem.response_format == "fenced"


@pytest.mark.parametrize(("write", "name"), FORMATS)
def test_taco_is_read_in_every_format(tmp_path: Path, write: Callable[[Path, list[Row]], Path], name: str) -> None:
    (problem,) = read_taco(write(tmp_path / name, [taco_row()]))
    assert [(test.stdin, test.stdout) for test in problem.tests.tests] == [(b"1\n", b"0.5\n"), (b"3", b"1.5")]
    assert problem.tests.checker == CHECKER_FLOAT
    assert problem.tests.limits.cpu_seconds == 2.5
    assert problem.tests.limits.memory_bytes == 256 << 20
    assert problem.human_solutions == ("print(int(input())/2)",)
    assert problem.difficulty == "medium_hard"


def test_the_three_formats_give_one_identity(tmp_path: Path) -> None:
    ids = {
        next(read_code_contests(write(tmp_path / name, [code_contests_row()]))).problem_id for write, name in FORMATS
    }
    assert len(ids) == 1


def test_absent_limits_fall_back_to_the_defaults(tmp_path: Path) -> None:
    row = code_contests_row() | {"time_limit": None, "memory_limit_bytes": 0}
    (problem,) = read_code_contests(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert problem.tests.limits.cpu_seconds == 2.0
    assert problem.tests.limits.memory_bytes == 256 << 20


def test_problems_that_no_stdin_judge_can_judge_are_left_out(tmp_path: Path) -> None:
    with_files = code_contests_row(1) | {"input_file": "input.txt"}
    rows = write_jsonl(tmp_path / "a.jsonl", [with_files, code_contests_row(2)])
    assert [problem.statement[:9] for problem in read_code_contests(rows)] == ["Problem 2"]
    huge = "9" * 5_000
    call = taco_row(1) | {"input_output": f'{{"fn_name": "f", "inputs": [[{huge}]], "outputs": [[1]]}}'}
    rows = write_jsonl(tmp_path / "b.jsonl", [call, taco_row(2)])
    assert [problem.statement[:9] for problem in read_taco(rows)] == ["Problem 2"]


def test_own_files_say_everything_about_a_problem(tmp_path: Path) -> None:
    row = own_row() | {
        "response_format": "raw",
        "checker": "special",
        "checker_program": "print('ok')",
        "limits": {"cpu_seconds": 0.5, "processes": 1},
        "human_solutions": ["print(0)"],
        "wrong_solutions": ["print(1)"],
        "difficulty": "easy",
    }
    (problem,) = read_jsonl(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert problem.tests.checker == CHECKER_SPECIAL
    assert problem.tests.checker_program == b"print('ok')"
    assert problem.tests.limits.cpu_seconds == 0.5
    assert problem.tests.limits.wall_seconds == 10.0
    assert problem.response_format == "raw"
    assert problem.human_solutions == ("print(0)",)


def reason(kind: str, path: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_tasks(TasksSpec(kind=kind, path=str(path), train_problems=1, evaluation_problems=0))
    (violation,) = caught.value.violations
    assert violation.pointer == "/tasks/path"
    return violation.message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "the row must be an object, not a list"),
        (json.dumps(own_row() | {"surprise": 1}), "surprise: is no field here"),
        (json.dumps(own_row() | {"statement": 3}), "statement: must be text, not a number"),
        (json.dumps(own_row() | {"tests": []}), "a problem needs tests, an answer, code_tests"),
        (json.dumps(own_row() | {"tests": [{"stdin": ""}]}), "tests/0/stdout: is missing"),
        (json.dumps(own_row() | {"limits": {"cpu_seconds": -1}}), "limits/cpu_seconds: must be above 0"),
        ('{"statement": "\\ud800", "tests": [{"stdin": "", "stdout": ""}]}', "surrogates not allowed"),
        (json.dumps(own_row() | {"tests": [{"stdin": "", "stdout": "\ud800"}]}), "surrogates not allowed"),
    ],
)
def test_a_malformed_line_is_named_with_file_number_and_reason(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(own_row()) + "\n\n" + line + "\n")
    message = reason("jsonl", file)
    assert f"{file}, line 3: " in message
    assert expected in message


def test_bytes_that_are_no_text_are_named_too(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"statement": "\xff\xfe"}\n')
    assert "line 1: not valid JSON" in reason("jsonl", file)


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("code_contests", code_contests_row() | {"public_tests": {"input": ["1"], "output": []}}, "1 inputs but 0"),
        ("code_contests", code_contests_row() | {"solutions": {"language": [3], "solution": []}}, "1 languages"),
        ("code_contests", code_contests_row() | {"difficulty": 99}, "difficulty"),
        ("code_contests", {"description": "No tests."}, "no tests"),
        ("code_contests", {"name": "No description."}, "description: is missing"),
        ("taco", taco_row() | {"input_output": "{"}, "line 1, input_output: not valid JSON"),
        ("taco", taco_row() | {"input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs but 0 outputs"),
        ("taco", taco_row() | {"input_output": '{"inputs": [], "outputs": []}'}, "no tests"),
        ("taco", taco_row() | {"solutions": '"print(1)"'}, "line 1, solutions"),
        ("taco", taco_row() | {"time_limit": "soon"}, "'soon' is no limit"),
    ],
)
def test_a_published_row_that_breaks_its_schema_is_named(tmp_path: Path, kind: str, row: Row, expected: str) -> None:
    assert expected in reason(kind, write_jsonl(tmp_path / "tasks.jsonl", [row]))


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", [code_contests_row()])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(whole.read_bytes()[:-100])
    assert "not a readable Parquet file" in reason("code_contests", broken)


def test_a_broken_arrow_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.arrow"
    file.write_bytes(b"no arrow")
    assert "not a readable Arrow stream" in reason("taco", file)


def test_pickles_and_unknown_files_are_never_opened(tmp_path: Path) -> None:
    file = tmp_path / "tasks.pkl"
    file.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "not one of .jsonl" in reason("jsonl", file)
    assert "holds no .jsonl" in reason("jsonl", tmp_path)
    assert "no such file" in reason("jsonl", tmp_path / "absent.jsonl")


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [own_row(1)])
    write_parquet(tmp_path / "2.parquet", [own_row(2)])
    (tmp_path / "README.md").write_text("ignored")
    assert [problem.statement for problem in read_jsonl(tmp_path)] == ["Print 1.", "Print 2."]


def statements(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.statement for problem in problems}


def test_the_split_is_disjoint_and_follows_the_seed_not_the_order_of_lines(tmp_path: Path) -> None:
    rows = [own_row(number) for number in range(40)]
    spec = TasksSpec(
        kind="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", rows)), train_problems=20, evaluation_problems=10
    )
    sets = load_tasks(spec)
    backwards = write_jsonl(tmp_path / "b.jsonl", [*rows[::-1], rows[5]])
    assert load_tasks(spec.model_copy(update={"path": str(backwards)})) == sets
    assert load_tasks(spec.model_copy(update={"seed": 1})) != sets
    assert (len(sets.train), len(sets.evaluation)) == (20, 10)
    assert not statements(sets.train) & statements(sets.evaluation)


def test_a_held_out_file_takes_its_statements_out_of_the_training_file(tmp_path: Path) -> None:
    spec = TasksSpec(
        kind="jsonl",
        path=str(write_jsonl(tmp_path / "train.jsonl", [own_row(number) for number in range(10)])),
        evaluation_path=str(write_jsonl(tmp_path / "test.jsonl", [own_row(number) for number in range(3)])),
        train_problems=100,
        evaluation_problems=3,
    )
    sets = load_tasks(spec)
    assert statements(sets.train) == {f"Print {number}." for number in range(3, 10)}
    assert statements(sets.evaluation) == {f"Print {number}." for number in range(3)}


def test_too_few_problems_are_an_error_that_counts_them(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [own_row(number) for number in range(5)])
    with pytest.raises(InvalidInput, match="leaves 0 of 5 problems"):
        load_tasks(TasksSpec(kind="jsonl", path=str(path), train_problems=5, evaluation_problems=5))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Sure:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nold\n```\ntext\n```python3\nnew\n```", "new\n"),
        ("```py\nunfinished", "unfinished"),
        ("print(2)", "print(2)"),
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints:\n```text\n1\n```\nDone.", "print(1)\n"),
        ("Use ```print``` as in\n```Python title=a.py\nprint(1)```", "print(1)"),
        ("```cpp\nint main() {}\n```", "int main() {}\n"),
        ("```text\n1\n```", "```text\n1\n```"),
    ],
)
def test_a_fenced_program_is_the_last_block_or_everything(response: str, program: str) -> None:
    assert extract_program(response, "fenced") == program


@pytest.mark.parametrize(
    ("response", "opened", "program"),
    [
        ("<think>\n```python\ndraft\n```\n</think>\n```python\nprint(1)\n```", False, "print(1)\n"),
        ("```python\ndraft\n```\n</think>\n```python\nprint(1)\n```", True, "print(1)\n"),
        ("<think>a</think>b<think>c</think>```\nprint(1)\n```", False, "print(1)\n"),
        ("<think>\n```python\ndraft\n```", False, ""),
        ("```python\ndraft\n```", True, ""),
        ("<think>a</think>```\nprint(1)\n```<think>more", False, ""),
        ("```python\nprint(1)\n```", False, "print(1)\n"),
    ],
)
def test_what_is_reasoned_before_the_answer_holds_no_program(response: str, opened: bool, program: str) -> None:
    length = USUAL.reasoning_length(response, opened=opened)
    trajectory = Trajectory(response_text=response, reasoning_characters=length)

    assert program_of(trajectory, "fenced") == program


@pytest.mark.parametrize(
    ("reasoning_characters", "program"), [(0, "second try"), (len("first tryfailedsecond "), "try")]
)
def test_of_a_conversation_the_last_action_holds_the_program(reasoning_characters: int, program: str) -> None:
    turns = [
        ("first try", SEGMENT_KIND_ACTION),
        ("failed", SEGMENT_KIND_OBSERVATION),
        ("second try", SEGMENT_KIND_ACTION),
    ]
    segments = [Segment(kind=kind, characters=len(text), tokens=1) for text, kind in turns]
    text = "".join(text for text, _ in turns)
    trajectory = Trajectory(response_text=text, segments=segments, reasoning_characters=reasoning_characters)

    assert program_of(trajectory, "raw") == program


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["```", "``` ", "```\n", "`", "<think>", "</think>", "<think", "```python", "\n```a"])
def test_any_response_is_read_in_linear_time(piece: str) -> None:
    response = piece * (4_000_000 // len(piece))
    trajectory = Trajectory(response_text=response, reasoning_characters=USUAL.reasoning_length(response))

    assert len(program_of(trajectory, "fenced")) <= len(response)


def test_a_raw_program_is_the_response_itself() -> None:
    assert extract_program("```python\nx\n```", "raw") == "```python\nx\n```"


def test_a_written_response_holds_its_program() -> None:
    for response_format in ("raw", "fenced"):
        assert extract_program(write_response("print(1)\n", response_format), response_format) == "print(1)\n"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "path", ["x" * 5000, "/" + "x" * 300 + ".jsonl", "/a\0b.jsonl", "/proc", "/dev/zero", "fifo.jsonl"]
)
def test_a_path_that_no_task_file_can_have_is_refused_at_once(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")

    with pytest.raises(InvalidInput) as caught:
        list(read_jsonl(tmp_path / path if path == "fifo.jsonl" else path))

    assert [fault.pointer for fault in caught.value.violations] == ["/tasks/path"]


@pytest.mark.timeout(10)
def test_a_fifo_among_task_files_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")

    with pytest.raises(InvalidInput, match="no regular file"):
        list(read_jsonl(tmp_path))
