"""What `spo judge` makes of files: tests, programs, checkers; each refusal says which file and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from spo.cli.judge import find_programs, read_tests, row_of
from spo.errors import InvalidInput, NotFound
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Checker, Limits, Outcome, Verdict

LIMITS = Limits(cpu_seconds=1)


def read(path: Path, checker: str = "tokens") -> verdict_pb2.TestSet:
    return read_tests(path, LIMITS, checker, 0, 0)[0]


@pytest.fixture
def tests_file(tmp_path: Path) -> Path:
    path = tmp_path / "tests.json"
    path.write_text('[{"stdin": "1\\n", "stdout": "é"}, {"stdin": "", "stdout": "", "public": true, "name": "x"}]')
    return path


def test_a_list_of_inputs_and_outputs_becomes_a_test_set(tests_file: Path) -> None:
    test_set, unknown = read_tests(tests_file, LIMITS, "float", 0.5, 0)

    assert [test.stdin for test in test_set.tests] == [b"1\n", b""]
    assert [test.stdout for test in test_set.tests] == ["é".encode(), b""]
    assert [test.public for test in test_set.tests] == [False, True]
    assert test_set.checker == Checker.CHECKER_FLOAT
    assert test_set.absolute_tolerance == 0.5
    assert test_set.limits == LIMITS
    assert unknown == {"name"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not JSON"),
        (b"[", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "an empty list"),
        (b'{"tests": []}', "a dict"),
        (b"3", "a int"),
        (b'[{"stdin": "\xff", "stdout": ""}]', "not UTF-8: byte 12 is 0xff"),
    ],
)
def test_a_file_that_is_no_list_of_tests_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)

    with pytest.raises(InvalidInput, match=complaint) as refusal:
        read(path)
    assert str(path) in refusal.value.message


def test_each_faulty_test_is_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '[{"stdin": "", "stdout": ""}, {"input": "", "stdout": 3}, 7, {"stdin": "\\ud800", "stdout": null},'
        ' {"stdin": "", "stdout": "", "public": 1}]'
    )

    with pytest.raises(InvalidInput) as refusal:
        read(path)
    assert {each.pointer: each.message for each in refusal.value.violations} == {
        "/1/stdin": "is missing",
        "/1/stdout": "must be text, is a int",
        "/2": "must be an object, is a int",
        "/3/stdin": "must be text, is text with half a surrogate pair",
        "/3/stdout": "must be text, is null",
        "/4/public": "must be true or false",
    }


def test_absent_files_folders_and_devices_are_refused(tmp_path: Path, tests_file: Path) -> None:
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"absent\.json"):
        read(tmp_path / "absent.json")
    with pytest.raises(NotFound, match=r"absent\.py"):
        find_programs([tests_file, tmp_path / "absent.py"], "python")
    with pytest.raises(NotFound, match=r"dangling\.py"):
        find_programs([tmp_path / "dangling.py"], None)
    with pytest.raises(NotFound):
        find_programs([tests_file / "below"], None)
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(InvalidInput, match="not a file"):
            find_programs([path], "python")


def test_the_language_is_told_by_the_name_or_by_the_caller(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.py", "b.CPP", "c.c", "d.java", "e.cobol")]
    for path in paths:
        path.touch()

    assert [each.language for each in find_programs(paths[:4], None)] == ["python", "cpp", "c", "java"]
    assert [each.language for each in find_programs(paths, "c")] == ["c"] * 5
    with pytest.raises(InvalidInput, match=r"e\.cobol .*--language"):
        find_programs(paths, None)


def test_a_checker_is_a_name_or_a_programs_file(tmp_path: Path, tests_file: Path) -> None:
    special = tmp_path / "check.cpp"
    special.write_text("int main(){}")

    test_set = read(tests_file, str(special))
    assert test_set.checker == Checker.CHECKER_SPECIAL
    assert (test_set.checker_program, test_set.checker_language) == (b"int main(){}", "cpp")
    with pytest.raises(InvalidInput, match="no checker 'tokenz'; known: tokens, exact"):
        read(tests_file, "tokenz")
    with pytest.raises(NotFound, match=r"absent\.py"):
        read(tests_file, "absent.py")


def test_a_row_has_the_promised_keys_and_says_more_only_when_there_is_more() -> None:
    result = verdict_pb2.TestResult(
        outcome=Outcome.OUTCOME_CPU_TIME_LIMIT, cpu_seconds=1.00000049, memory_bytes=7, detail="x"
    )
    verdict = Verdict(outcome=Outcome.OUTCOME_CPU_TIME_LIMIT, tests=[result], isolation="tier")

    row = row_of(Path("a.py"), verdict)
    assert row == {
        "program": "a.py",
        "outcome": "cpu_time_limit",
        "tests": [
            {"outcome": "cpu_time_limit", "cpu_seconds": 1.0, "wall_seconds": 0.0, "memory_bytes": 7, "detail": "x"}
        ],
        "isolation": "tier",
    }
    verdict.outcome, verdict.detail, verdict.suspected_hard_coded = Outcome.OUTCOME_COMPILE_ERROR, "why", True
    assert row.keys() ^ row_of(Path("a.py"), verdict).keys() == {"detail", "flags"}
