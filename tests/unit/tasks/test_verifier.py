"""What `tasks.verifier` makes of the problems of a file, for each kind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec, parse_job_spec, spec_from_json, spec_to_json
from spo.spec.tasks import verifiers_in, with_models
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem
from spo.tasks.verifier import MOST_SOURCE_BYTES

PROGRAM = {"statement": "Add.", "tests": [{"stdin": "1 2", "stdout": "3"}], "human_solutions": ["print(3)"]}
ANSWER = {"statement": "What is 1 + 2?", "answer": {"expected": ["3"]}}
TOLD = {"statement": "Write a poem.", "arguments": {"metre": "iambic", "lines": 4}}
LENGTH = {"name": "short", "weight": 0.5, "length": {"free_characters": 10, "most_characters": 20}}


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    path = tmp_path / "score.py"
    path.write_text("def score(response, statement, expected, **more):\n    return 1.0\n")
    return path


def problem_of(tmp_path: Path, row: dict[str, Any], verifier: dict[str, Any] | None) -> Problem:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tasks: dict[str, Any] = {"kind": "jsonl", "path": str(path), "evaluation_problems": 0}
    spec = parse_job_spec({"model": {"path": "/m"}, "tasks": tasks | ({"verifier": verifier} if verifier else {})})
    assert spec_from_json(spec_to_json(spec)) == spec
    return load_tasks(spec.tasks).train[0]


def faults_of(verifier: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidInput) as refused:
        parse_job_spec({"model": {"path": "/m"}, "tasks": {"verifier": verifier}})
    return [fault.pointer for fault in refused.value.violations]


def test_by_default_the_task_file_decides_and_digests_stay(tmp_path: Path) -> None:
    plain = problem_of(tmp_path, PROGRAM, None)
    assert plain == problem_of(tmp_path, PROGRAM, {"kind": "program"})
    assert plain.tests.tests[0].stdout == b"3"
    assert plain.response_format == "fenced"


def test_a_function_is_told_of_the_problem(tmp_path: Path, scored: Path) -> None:
    verifier = {"kind": "python", "path": str(scored), "pass_score": 0.5}
    told = problem_of(tmp_path, TOLD, verifier)
    function = told.tests.scoring_function
    assert json.loads(function.arguments_json) == TOLD["arguments"] | {"statement": "Write a poem.", "expected": []}
    assert function.source == scored.read_text()
    assert (told.language, told.response_format, told.tests.pass_score) == ("text", "raw", 0.5)
    assert told.tests.limits.cpu_seconds > 0
    answered = problem_of(tmp_path, ANSWER, verifier)
    assert json.loads(answered.tests.scoring_function.arguments_json)["expected"] == ["3"]


def test_a_response_that_only_a_function_judges_is_no_program(tmp_path: Path, scored: Path) -> None:
    verifier = {"kind": "python", "path": str(scored)}
    told = problem_of(tmp_path, TOLD | {"human_solutions": ["drip"], "wrong_solutions": [""]}, verifier)
    assert (told.human_solutions, told.wrong_solutions) == (("drip",), ("",))
    fenced = problem_of(tmp_path, TOLD | {"human_solutions": ["1"], "response_format": "fenced"}, verifier)
    assert fenced.human_solutions == ("```python\n1\n```",)


def test_another_verifier_or_another_source_is_another_problem(tmp_path: Path, scored: Path) -> None:
    verifier = {"kind": "python", "path": str(scored)}
    ids = {problem_of(tmp_path, ANSWER, each).problem_id for each in (None, verifier, verifier | {"pass_score": 0.5})}
    scored.write_text(scored.read_text() + "# changed\n")
    ids.add(problem_of(tmp_path, ANSWER, verifier).problem_id)
    assert len(ids) == 4


def test_services_and_models_are_told_of_the_problem(tmp_path: Path) -> None:
    http = problem_of(tmp_path, ANSWER, {"kind": "http", "url": "https://scores.example/v1", "timeout_seconds": 5})
    assert (http.tests.http.url, http.tests.http.timeout_seconds) == ("https://scores.example/v1", 5)
    assert json.loads(http.tests.http.arguments_json)["statement"] == "What is 1 + 2?"
    model = problem_of(tmp_path, ANSWER, {"kind": "model", "rubric": "Is it right?", "votes": 3}).tests.model
    assert (model.rubric, model.votes, model.reference, model.statement) == ("Is it right?", 3, "3", "What is 1 + 2?")


def test_a_composition_holds_the_files_own_tests_and_sees_whole_responses(tmp_path: Path, scored: Path) -> None:
    parts = [
        {"name": "format", "weight": 0, "gate": True, "verifier": {"kind": "format", "expression": "(?s).*```.*"}},
        {"name": "right", "verifier": {"kind": "program"}},
        {"name": "style", "weight": 0.5, "verifier": {"kind": "python", "path": str(scored)}},
        {"name": "english", "weight": 0.1, "language": {"script": "latin"}},
        LENGTH,
    ]
    composed = problem_of(tmp_path, PROGRAM, {"kind": "composition", "parts": parts})
    built = composed.tests.composition.parts
    assert [part.name for part in built] == ["format", "right", "style", "english", "short"]
    assert built[1].verifier == problem_of(tmp_path, PROGRAM, None).tests
    assert (built[3].language.script, built[4].length.most_characters) == ("latin", 20)
    assert (composed.language, composed.response_format) == ("python", "raw")
    assert composed.human_solutions == ("```python\nprint(3)\n```",)
    assert [part.response_format for part in built] == [""] * 5
    corrects = problem_of(
        tmp_path, {**PROGRAM, "response_format": "fenced_last"}, {"kind": "composition", "parts": parts}
    )
    assert [part.response_format for part in corrects.tests.composition.parts] == ["", "fenced_last", "", "", ""]


def test_each_row_is_decided_by_the_verifier_that_it_names(tmp_path: Path, scored: Path) -> None:
    poems = {"kind": "python", "path": str(scored), "pass_score": 0.5}
    by_row = {"kind": "per_problem", "verifiers": {"default": {"kind": "program"}, "poems": poems}}

    assert problem_of(tmp_path, PROGRAM, by_row) == problem_of(tmp_path, PROGRAM, None)
    named = problem_of(tmp_path, {"statement": "Write a poem.", "verifier": "poems"}, by_row)
    alone = problem_of(tmp_path, TOLD | {"arguments": {}}, poems)
    assert (named.problem_id, named.tests) == (alone.problem_id, alone.tests)


@pytest.mark.parametrize(
    ("row", "verifiers", "said"),
    [
        (ANSWER | {"verifier": "poems"}, {"songs": {"kind": "program"}}, "'poems'; the job has songs"),
        (ANSWER, {"songs": {"kind": "program"}}, "no verifier; the job has songs"),
        (ANSWER | {"verifier": "poems"}, None, "'poems', and the job's is not of kind per_problem"),
        (TOLD | {"verifier": "songs"}, {"songs": {"kind": "program"}}, "neither tests nor an answer"),
    ],
)
def test_a_row_that_names_what_cannot_decide_it_is_named(
    tmp_path: Path, row: dict[str, Any], verifiers: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(InvalidInput, match=r"problems\.jsonl, line 1: ") as refused:
        problem_of(tmp_path, row, {"kind": "per_problem", "verifiers": verifiers} if verifiers else None)
    assert (refused.value.code, said in refused.value.message) == ("malformed_task", True)


def test_all_that_rows_may_name_are_checked_and_pinned_at_their_place() -> None:
    judge = {"kind": "model", "rubric": "r", "model": "served:one"}
    parts = [{"name": "form", "verifier": {"kind": "format", "expression": "a"}}, {"name": "judged", "verifier": judge}]
    named = {"plain": judge, "both": {"kind": "composition", "parts": parts}, "code": {"kind": "program"}}
    verifier = TasksSpec.model_validate({"verifier": {"kind": "per_problem", "verifiers": named}}).verifier

    places = [at for at, _ in verifiers_in(verifier)]
    both = "verifier/verifiers/both/parts"
    assert places == [
        "verifier/verifiers/plain",
        f"{both}/0/verifier",
        f"{both}/1/verifier",
        "verifier/verifiers/code",
    ]
    renamed = with_models(verifier, lambda at, _: f"served:{at.split('/')[2]}")
    models = {at: one.model for at, one in verifiers_in(renamed) if one.kind == "model"}
    assert models == {"verifier/verifiers/plain": "served:plain", f"{both}/1/verifier": "served:both"}


def test_a_problem_that_lacks_what_decides_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"problems.jsonl, line 1: neither tests nor an answer") as refused:
        problem_of(tmp_path, TOLD, None)
    assert refused.value.code == "malformed_task"
    with pytest.raises(InvalidInput, match="statement is given by the platform itself"):
        problem_of(tmp_path, {"statement": "?", "arguments": {"statement": 1}}, None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def other(response): return 1", "defines no function score"),
        ("def score(", "is no Python"),
        ("#" * (MOST_SOURCE_BYTES + 1), "is longer than"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_the_function_is_refused(tmp_path: Path, source: str | None, said: str) -> None:
    path = tmp_path / "score.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(InvalidInput, match=said) as refused:
        problem_of(tmp_path, ANSWER, {"kind": "python", "path": str(path)})
    assert refused.value.code == "unusable_function"


@pytest.mark.parametrize(
    ("parts", "pointer"),
    [
        ([], "parts"),
        ([LENGTH], "parts"),
        ([{"name": "a", "weight": 0, "verifier": {"kind": "program"}}], "parts"),
        ([{"name": "a", "verifier": {"kind": "program"}}, LENGTH | {"name": "a"}], "parts/1/name"),
        ([{"name": "a", "weight": float("nan"), "verifier": {"kind": "program"}}], "parts/0/weight"),
        ([{"name": "a", "weight": -1, "verifier": {"kind": "program"}}], "parts/0/weight"),
        ([{"name": "a b", "verifier": {"kind": "program"}}], "parts/0/name"),
        ([{"name": "a"}], "parts/0/verifier"),
        ([LENGTH | {"verifier": {"kind": "program"}}], "parts/0/verifier"),
        ([LENGTH | {"gate": True}], "parts/0/gate"),
        ([LENGTH | {"weight": 2}], "parts/0/weight"),
        ([{"name": "a", "language": {"script": "klingon"}}], "parts/0/language/script"),
        ([{"name": "a", "length": {"free_characters": 9, "most_characters": 9}}], "parts/0/length/most_characters"),
        ([{"name": "a", "verifier": {"kind": "composition", "parts": []}}], "parts/0/verifier"),
        ([{"name": "a", "verifier": {"kind": "http", "url": "ftp://a"}}], "parts/0/verifier/url"),
    ],
)
def test_a_composition_that_makes_no_score_is_refused(parts: list[dict[str, Any]], pointer: str) -> None:
    assert f"/tasks/verifier/{pointer}" in faults_of({"kind": "composition", "parts": parts})


@pytest.mark.parametrize(
    ("verifier", "pointer"),
    [
        ({"kind": "psychic"}, ""),
        ({"path": "/x"}, ""),
        ({"kind": "python"}, "/path"),
        ({"kind": "python", "path": "/x", "function": "os.system"}, "/function"),
        ({"kind": "http", "url": "https://user:secret@host/"}, "/url"),
        ({"kind": "model", "rubric": "r", "address": "https://host/v1"}, "/model"),
        ({"kind": "model", "rubric": "r", "votes": 0}, "/votes"),
        ({"kind": "model", "rubric": "r", "model": "judge-8b"}, "/address"),
        ({"kind": "program", "path": "/x"}, "/path"),
        ({"kind": "per_problem", "verifiers": {}}, "/verifiers"),
        ({"kind": "per_problem", "verifiers": {"a": {"kind": "per_problem", "verifiers": {}}}}, "/verifiers/a"),
        ({"kind": "per_problem", "verifiers": {"a": {"kind": "http", "url": "ftp://a"}}}, "/verifiers/a/url"),
    ],
)
def test_a_verifier_that_cannot_be_is_refused(verifier: dict[str, Any], pointer: str) -> None:
    assert faults_of(verifier) == [f"/tasks/verifier{pointer}"]


def test_public_tests_need_a_program() -> None:
    verifier = {"kind": "model", "rubric": "r"}
    with pytest.raises(ValueError, match="no verifier of kind program"):
        TasksSpec.model_validate({"verifier": verifier, "reward": {"tests": "public"}})


@pytest.mark.parametrize(
    ("code_tests", "reason"),
    [
        ({"code": "import pickle\nassert pickle.dumps(f)"}, "line 1 imports pickle"),
        ({"code": "assert f() == 1", "isolation": "shared"}, "the row says isolation: shared"),
        ({"code": "assert f() == 1"}, None),
        ({"code": "from pathlib import Path\nassert f() == Path('a')"}, None),
        ({"code": "from pathlib import Path\nassert Path('a').read_text() == f()"}, "line 2 uses files by read_text"),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_job_may_demand_that_all_its_tests_are_separate_from_responses(
    tmp_path: Path, code_tests: dict[str, str], reason: str | None, within: bool
) -> None:
    row = {"statement": "Write f.", "code_tests": code_tests, "response_format": "raw"}
    demand: dict[str, Any] = {"kind": "program", "isolation": "separate"}
    if within:
        demand = {"kind": "composition", "parts": [{"name": "right", "weight": 1, "verifier": demand}, LENGTH]}
    if reason is None:
        assert problem_of(tmp_path, row, demand).tests.ByteSize()
        return
    with pytest.raises(InvalidInput) as refused:
        problem_of(tmp_path, row, demand)
    (fault,) = refused.value.violations
    assert "line 1: code_tests: they cannot be separate from a response" in fault.message
    assert reason in fault.message
    assert problem_of(tmp_path, row, None)
