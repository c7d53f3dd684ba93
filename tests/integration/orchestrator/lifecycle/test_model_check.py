"""A model that cannot serve a job's prompts is refused when the job is submitted, by field, and holds nobody up."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import checks
from services.orchestrator.container import AppContext
from spo.errors import InvalidInput
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import distilled, write_model_without_weights
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.support.scripted_model import write_scripted_model

Document = dict[str, Any]
SPINNING = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}x"
HUNGRY = "{{ 'x' * 99999999999 }}"


def model(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "other"
    write_model_without_weights(folder, **config)
    return folder


def with_template(folder: Path, template: str) -> Path:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if name.endswith("jinja"):
            (folder / name).write_text(template)
        else:
            settings = json.loads((folder / name).read_text())
            settings.pop("chat_template", None)
            (folder / name).write_text(json.dumps(settings))
    return folder


def task_file(tmp_path: Path, statements: list[str]) -> Path:
    test = {"stdin": "1", "stdout": "1"}
    # The toy's mix has a share of solutions by people.
    row = {"tests": [test], "response_format": "raw", "human_solutions": ["print(1)"]}
    rows = [json.dumps({"statement": each, **row}) for each in statements]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(rows))
    return file


def faults(context: AppContext, document: Document, **sections: Any) -> dict[str, str]:
    """Messages by pointer of what is refused."""
    with pytest.raises(InvalidInput) as caught:
        context.spec_check.require_possible(parse_job_spec({**document, **sections}))
    assert caught.value.code == "invalid_job_spec"
    return {fault.pointer: fault.message for fault in caught.value.violations}


def test_a_model_that_can_serve_is_accepted(context: AppContext, document: Document) -> None:
    context.spec_check.require_possible(parse_job_spec(document))


def test_a_folder_without_a_tokenizer_is_refused(context: AppContext, document: Document, tmp_path: Path) -> None:
    folder = model(tmp_path)
    for file in inspect_model_folder(folder).tokenizer_files:
        file.unlink()

    assert "no tokenizer" in faults(context, document, model={"path": str(folder)})["/model/path"]


@pytest.mark.parametrize("content", ["{}", "[]", "nonsense", '{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_cannot_be_loaded_is_refused(
    context: AppContext, document: Document, tmp_path: Path, content: str
) -> None:
    folder = model(tmp_path)
    (folder / "tokenizer.json").write_text(content)

    assert "tokenizer" in faults(context, document, model={"path": str(folder)})["/model/path"]


def test_a_template_that_spins_is_refused_in_seconds(context: AppContext, document: Document, tmp_path: Path) -> None:
    folder = with_template(model(tmp_path), SPINNING)
    began = time.monotonic()

    assert "chat template takes longer" in faults(context, document, model={"path": str(folder)})["/model/path"]
    assert time.monotonic() - began < 30


def test_a_template_that_takes_all_memory_is_refused(context: AppContext, document: Document, tmp_path: Path) -> None:
    folder = with_template(model(tmp_path), HUNGRY)

    assert "too much at once" in faults(context, document, model={"path": str(folder)})["/model/path"]


def test_a_system_prompt_counts_among_the_prompts_tokens(
    context: AppContext, document: Document, tmp_path: Path
) -> None:
    folder = with_template(model(tmp_path), "{% for message in messages %}{{ message.content }}{% endfor %}")
    tasks = {"kind": "jsonl", "path": str(task_file(tmp_path, ["sum", "count"])), "train_problems": 1}
    tasks["evaluation_problems"] = 1
    fits = {"path": str(folder), "max_prompt_tokens": 4}

    context.spec_check.require_possible(parse_job_spec({**document, "model": fits, "tasks": tasks}))
    found = faults(context, document, model={**fits, "chat": {"system": "sum" * 9}}, tasks=tasks)

    assert "have more than 4 tokens" in found["/model/max_prompt_tokens"]


@pytest.mark.cpu_seconds(120)  # the parsers of the engine are loaded in a process for each question
def test_a_tool_parser_that_does_not_read_what_the_template_writes_is_refused_by_its_field(
    context: AppContext, document: Document, tmp_path: Path
) -> None:
    write_scripted_model(tmp_path / "scripted")
    document["model"] = {**document["model"], "path": str(tmp_path / "scripted"), "max_prompt_tokens": 256}
    for parser in ("pythonic", "nobodys"):
        found = faults(context, document, model={**document["model"], "chat": {"tool_parser": parser}})
        assert "no such parser" in found["/model/chat/tool_parser"]
    fits = {**document["model"], "chat": {"tool_parser": "hermes"}}
    context.spec_check.require_possible(parse_job_spec({**document, "model": fits}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}", "leaves the system prompt out"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x", "no"),
        (None, "no chat template"),
    ],
)
def test_a_system_prompt_that_the_template_does_not_take_is_refused_by_its_field(
    context: AppContext, document: Document, tmp_path: Path, template: str | None, message: str
) -> None:
    folder = with_template(model(tmp_path), template or "")
    if template is None:
        (folder / "chat_template.jinja").unlink()
    spec = {"path": str(folder), "chat": {"system": "count"}}

    assert message in faults(context, document, model=spec)["/model/chat/system"]


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    context: AppContext, document: Document, tmp_path: Path
) -> None:
    folder = model(tmp_path, vocab_size=7)

    assert "vocabulary of 7" in faults(context, document, model={"path": str(folder)})["/model/path"]


def test_more_tokens_than_the_model_has_positions_are_refused(
    context: AppContext, document: Document, tmp_path: Path
) -> None:
    folder = model(tmp_path, max_position_embeddings=100)
    limits = {"path": str(folder), "max_prompt_tokens": 64, "max_response_tokens": 44}

    assert "108 tokens together" in faults(context, document, model=limits)["/model/max_response_tokens"]


@pytest.mark.parametrize("config", [{"head_dim": 24}, {"hidden_size": 48}])
def test_a_head_size_that_no_engine_here_takes_is_refused(
    context: AppContext, document: Document, tmp_path: Path, config: Document
) -> None:
    spec = {"path": str(model(tmp_path, **config))}
    # Nobody has said what it takes.
    context.spec_check.require_possible(parse_job_spec({**document, "model": spec}))
    context.replicas.beat(HeartbeatRequest(replica_id="a", pool="inference", head_sizes=[32, 64]))

    assert "24 dimensions; the engines here know 32, 64" in faults(context, document, model=spec)["/model/path"]

    context.replicas.beat(HeartbeatRequest(replica_id="gpu", pool="inference"))
    context.spec_check.require_possible(parse_job_spec({**document, "model": spec}))


def test_prompts_that_are_too_long_are_named_by_id(context: AppContext, document: Document, tmp_path: Path) -> None:
    file = task_file(tmp_path, ["sum", "sum of the numbers " * 40, "count"])
    tasks = {"kind": "jsonl", "path": str(file), "train_problems": 3, "evaluation_problems": 0}
    long = next(
        each
        for each in context.library.load(parse_job_spec({**document, "tasks": tasks}).tasks).train
        if len(each.statement) > 100
    )

    message = faults(context, document, tasks=tasks)["/model/max_prompt_tokens"]

    assert message.startswith("1 of 3 training prompts have more than 64 tokens: ")
    assert long.problem_id in message


def test_what_was_found_is_remembered_by_content(
    context: AppContext, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path)
    # The same limits: how long prompts may be decides the answer too.
    document = {**document, "model": {"path": str(folder)}}
    context.spec_check.require_possible(parse_job_spec(document))
    copy = shutil.copytree(folder, tmp_path / "copy")
    copied = {**document, "model": {"path": str(copy)}}

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(checks, "_ask", refuse)
    context.spec_check.require_possible(parse_job_spec(copied))
    (copy / "tokenizer_config.json").write_text((copy / "tokenizer_config.json").read_text() + "\n")
    with pytest.raises(AssertionError, match="was started"):
        context.spec_check.require_possible(parse_job_spec(copied))


def test_the_small_model_of_every_test_is_tried_once(
    context: AppContext, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.spec_check.require_possible(parse_job_spec(document))
    monkeypatch.setattr(checks, "_ask", lambda *_: pytest.fail("a process was started"))

    context.spec_check.require_possible(parse_job_spec({**document, "model": {"path": str(model(tmp_path))}}))


def test_over_rest_it_is_a_problem_with_pointers(api: httpx.Client, document: Document, tmp_path: Path) -> None:
    (model(tmp_path) / "tokenizer.json").write_text("{}")

    answer = api.post("/v1/jobs?validate_only=true", json={**document, "model": {"path": str(tmp_path / "other")}})

    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/model/path"]
    assert api.get("/v1/jobs").json()["items"] == []


# --- jobs that are accepted already ---


@pytest.fixture
def advance(context: AppContext) -> Callable[[str], JobState]:
    """One round of the runner; returns the job's state."""

    def tick(job_id: str) -> JobState:
        context.runner.tick()
        return context.jobs.state(job_id)

    return tick


def test_every_prompt_is_checked_before_a_job_is_estimated(
    context: AppContext,
    document: Document,
    tmp_path: Path,
    advance: Callable[[str], JobState],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "PROMPTS_AT_SUBMIT", 1)
    # The longest text has few tokens; a shorter one has many.
    file = task_file(tmp_path, ["sum of the numbers above " * 4, *["+-*%" * 20 + str(number) for number in range(3)]])
    tasks = {"kind": "jsonl", "path": str(file), "train_problems": 4, "evaluation_problems": 0}
    spec = parse_job_spec({**document, "tasks": tasks})
    context.spec_check.require_possible(spec)
    bad, good = context.jobs.submit(spec), context.jobs.submit(parse_job_spec(document))

    wait_until(lambda: advance(bad) is JobState.FAILED, "the job with long prompts fails", 60)
    wait_until(lambda: advance(good) not in (JobState.QUEUED, JobState.VALIDATING), "the other goes on", 60)

    record = context.jobs.record(bad)
    assert record.failure_code == "model_refused"
    assert "/model/max_prompt_tokens: 3 of 4 training prompts" in record.failure_message


def test_a_few_prompts_that_are_too_long_are_told_and_left_out(
    open_context: Callable[..., AppContext], document: Document, tmp_path: Path
) -> None:
    context = open_context(max_dead_letter_share=0.5)
    file = task_file(tmp_path, ["sum", "sum of the numbers " * 40, "count"])
    tasks = {"kind": "jsonl", "path": str(file), "train_problems": 3, "evaluation_problems": 0}
    spec = parse_job_spec({**document, "tasks": tasks})
    context.spec_check.require_possible(spec)
    job_id = context.jobs.submit(spec)

    def told() -> list[dict[str, Any]]:
        context.runner.tick()
        return [event.body for event in context.jobs.events(job_id) if event.kind == "prompts_too_long"]

    wait_until(lambda: bool(told()), "the prompt is told", 60)

    (body,) = told()
    assert (body["total"], body["max_prompt_tokens"], len(body["prompts"])) == (1, 64, 1)


def test_a_model_that_went_bad_since_it_was_submitted_fails_its_job_alone(
    context: AppContext, document: Document, tmp_path: Path, advance: Callable[[str], JobState]
) -> None:
    bad = context.jobs.submit(parse_job_spec({**document, "model": {"path": str(model(tmp_path))}}))
    good = context.jobs.submit(parse_job_spec(document))
    with_template(tmp_path / "other", SPINNING)

    wait_until(lambda: advance(good) not in (JobState.QUEUED, JobState.VALIDATING), "the healthy one goes on", 60)
    wait_until(lambda: advance(bad) is JobState.FAILED, "the other fails", 60)

    assert "chat template takes longer" in context.jobs.record(bad).failure_message


def test_a_teacher_must_read_the_students_tokens(context: AppContext, document: Document, tmp_path: Path) -> None:
    """The same ids for the same tokens; its size and its template are its own."""
    folder = model(tmp_path, hidden_size=128)
    taught = distilled(document, folder)
    context.spec_check.require_possible(parse_job_spec(taught))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert "tokenizer.json differ" in faults(context, taught)["/algorithm/teacher/path"]

    absent = distilled(document, tmp_path / "absent")
    assert "not a folder" in faults(context, absent)["/algorithm/teacher/path"]


def test_a_teacher_that_a_fork_made_is_fetched_like_the_model(
    context: AppContext, document: Document, tmp_path: Path
) -> None:
    teacher = model(tmp_path, hidden_size=128)
    wanted = list[str]()

    def here(path: str) -> Path:
        wanted.append(path)
        return Path(path)

    check = checks.ModelCheck(context.replicas, 0.0, here)
    spec = parse_job_spec(distilled(document, teacher))
    assert check.at_submit(spec, None) == []
    assert wanted == [spec.model.path, str(teacher)]
