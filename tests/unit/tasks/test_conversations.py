"""Problems that are answered in conversations: what their prompts carry, and which jobs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.spec.tasks import ConversationSetup, setup_from_json
from spo.tasks.load import load_tasks

RETRY = {"name": "retry_with_errors", "max_turns": 3, "arguments": {"attempts": 3, "message": "Again: {statement}"}}
TOY = {"kind": "toy", "train_problems": 3, "evaluation_problems": 2}


def test_a_conversations_problem_is_another_than_the_same_statement_alone() -> None:
    alone = load_tasks(TasksSpec.model_validate(TOY))
    talks = load_tasks(TasksSpec.model_validate({**TOY, "environment": RETRY}))
    longer = load_tasks(TasksSpec.model_validate({**TOY, "environment": {**RETRY, "max_turns": 4}}))

    for single, problem in zip((*alone.train, *alone.evaluation), (*talks.train, *talks.evaluation), strict=True):
        assert (problem.statement, problem.tests_digest) == (single.statement, single.tests_digest)
        setup = setup_from_json(problem.environment_json)
        assert (problem.environment, setup.max_turns, setup.max_observation_tokens) == ("retry_with_errors", 3, 512)
        assert setup.arguments == {"attempts": 3, "message": f"Again: {single.statement}"}
        assert setup.problem["public_tests_digest"] == problem.public_tests_digest != problem.tests_digest
        # What was estimated of the one says nothing of the other.
        assert problem.problem_id != single.problem_id
    assert not {each.problem_id for each in talks.train} & {each.problem_id for each in longer.train}


def test_problems_without_public_tests_have_nothing_to_show(tmp_path: Path) -> None:
    hidden = {"statement": "Double it", "tests": [{"stdin": "1", "stdout": "2"}]}
    shown = {"statement": "Halve it", "tests": [{"stdin": "4", "stdout": "2", "public": True}]}
    path = tmp_path / "tasks.jsonl"
    tasks = {"kind": "jsonl", "path": str(path), "evaluation_problems": 0, "environment": RETRY}

    path.write_text(f"{json.dumps(hidden)}\n{json.dumps(shown)}\n")
    found = load_tasks(TasksSpec.model_validate(tasks))
    assert [problem.statement for problem in found.train] == ["Halve it"]
    assert "1 problems without public tests" in found.notes[-1]
    path.write_text(json.dumps(hidden) + "\n")
    with pytest.raises(InvalidInput) as caught:
        load_tasks(TasksSpec.model_validate(tasks))
    assert caught.value.code == "no_public_tests"


@pytest.mark.parametrize(
    ("sections", "pointer"),
    [
        ({"value": {"pivotal": {}}}, "/value/pivotal"),
        ({"offline": {"human_solutions": True}, "replay": {"mix": [{"source": "human", "share": 1}]}}, "/replay/mix"),
    ],
)
def test_what_no_conversation_has_is_refused_beside_an_environment(sections: dict[str, object], pointer: str) -> None:
    alone = {"model": {"path": "/models/pi0"}, "tasks": TOY, **sections}
    assert pointer not in faults(alone)
    assert pointer in faults({**alone, "tasks": {**TOY, "environment": RETRY}})


def faults(document: dict[str, object]) -> set[str]:
    """The pointers of a spec's faults."""
    try:
        parse_job_spec(document)
    except InvalidInput as error:
        return {violation.pointer for violation in error.violations}
    return set()


@pytest.mark.parametrize(
    "text",
    ["[1]", "{", '{"max_turns": 0}', '{"max_turns": true}', '{"max_observation_tokens": 1e9}', '{"arguments": 1}'],
)
def test_a_prompt_that_sets_up_no_conversation_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        setup_from_json(text)
    assert caught.value.code == "bad_environment"


def test_what_a_later_release_adds_is_passed_over() -> None:
    assert setup_from_json('{"max_turns": 2, "later": 1}') == ConversationSetup(max_turns=2)
    assert setup_from_json("") == ConversationSetup()
