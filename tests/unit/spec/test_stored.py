"""Documents that another release stored: read leniently, and never guessed at."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator.auth import ApiKey
from services.orchestrator.datasets import Dataset
from services.orchestrator.evaluation import RequestedEvaluation
from services.orchestrator.job_records import JobRecord
from services.value_estimation.prompt_estimate import PromptFeatures
from spo.errors import InvalidInput, NotReady
from spo.experience.columns import StoredTrajectory, rows_of, table_of
from spo.spec.job_spec import JobSpec, parse_job_spec, spec_from_json, spec_to_json
from spo.spec.section import decode_state, record_from_json, wire_name, wire_number
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Outcome, Verdict

Edit = Callable[[dict[str, Any]], None]


def stored(edit: Edit) -> str:
    """The spec of a job as another release would have stored it."""
    document = json.loads(spec_to_json(parse_job_spec({"model": {"path": "/pi0"}})))
    edit(document)
    return json.dumps(document)


def everywhere(document: dict[str, Any]) -> None:
    for section in (document, document["replay"], document["algorithm"]["losses"][0], document["replay"]["mix"][0]):
        section["of_a_later_release"] = {"nested": [1]}


def test_fields_of_a_later_release_are_left_out() -> None:
    assert spec_from_json(stored(everywhere)) == parse_job_spec({"model": {"path": "/pi0"}})


def test_the_same_fields_are_refused_when_they_are_submitted() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_job_spec(json.loads(stored(everywhere)))

    pointers = {violation.pointer for violation in refused.value.violations}
    assert "/of_a_later_release" in pointers
    assert "/algorithm/losses/0/of_a_later_release" in pointers


@pytest.mark.parametrize(
    ("edit", "read"),
    [
        (lambda spec: spec["value"].update(temperature=77.0), lambda spec: spec.value.temperature == 77.0),
        (lambda spec: spec["rollout"].update(temperature=[0.5, 77.0]), lambda spec: spec.rollout.temperature[1] == 77),
        (lambda spec: spec["trainer"].update(steps=10**12), lambda spec: spec.trainer.steps == 10**12),
        # A rule between sections: minibatches must divide the batch.
        (lambda spec: spec["trainer"].update(minibatches=7), lambda spec: spec.trainer.minibatches == 7),
    ],
    ids=["bound", "bound of a range", "bound of a count", "rule"],
)
def test_a_bound_or_rule_that_moved_ends_no_job_that_runs(edit: Edit, read: Callable[[JobSpec], bool]) -> None:
    text = stored(edit)

    assert read(spec_from_json(text))
    with pytest.raises(InvalidInput):
        parse_job_spec(json.loads(text))


@pytest.mark.parametrize(
    "edit",
    [
        lambda spec: spec["algorithm"]["losses"][0].update(objective="of_a_later_release"),
        lambda spec: spec["replay"]["mix"][0].update(sampler="of_a_later_release"),
        lambda spec: spec["tasks"].update(kind="of_a_later_release"),
    ],
    ids=["objective", "sampler", "tasks"],
)
def test_what_this_release_cannot_do_waits_for_one_that_can(edit: Edit) -> None:
    with pytest.raises(NotReady, match="what another one stored") as waiting:
        spec_from_json(stored(edit))

    assert waiting.value.code == "unreadable_document"
    assert waiting.value.retryable


def test_a_state_of_a_later_release_is_neither_absent_nor_a_crash() -> None:
    with pytest.raises(NotReady) as waiting:
        decode_state(b"hibernating")

    assert waiting.value.code == "unreadable_document"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            RequestedEvaluation,
            {"id": "eval_1", "job_id": "job_1", "version": 1, "tasks": None, "protocol": {}, "tenant": ""},
        ),
        (
            Dataset,
            {
                "id": "ds_1",
                "tenant": "",
                "name": "n",
                "task_format": "jsonl",
                "file_format": "jsonl",
                "size_bytes": 1,
            },
        ),
        (
            ApiKey,
            {
                "key_id": "k",
                "name": "n",
                "tenant": "",
                "scopes": [],
                "max_active_jobs": None,
                "digest": "d",
                "created_at": "2026-01-01T00:00:00Z",
                "expires_unix": 0,
            },
        ),
        (PromptFeatures, {}),
    ],
    ids=["evaluation", "dataset", "api key", "features"],
)
def test_a_stored_record_is_read_by_the_fields_that_are_known(kind: type[Any], fields: dict[str, object]) -> None:
    assert record_from_json(kind, json.dumps(fields | {"of_a_later_release": 1})) == kind(**fields)


def test_a_job_record_with_a_longer_lineage_is_read() -> None:
    lineage = {"parent": "job_0", "version": 1, "checkpoint_step": None, "as_reference": False, "forked_at": "t"}
    fields = {"name": "n", "labels": "{}", "created_at": "t", "created_unix_ms": "1", "of_a_later_release": "1"}
    fields["lineage"] = json.dumps(lineage | {"of_a_later_release": 1})

    record = JobRecord.from_redis({name.encode(): value.encode() for name, value in fields.items()})

    assert record.lineage is not None
    assert record.lineage.parent == "job_0"


def test_an_outcome_of_a_later_release_is_named_by_its_number() -> None:
    verdict = Verdict.FromString(Verdict(outcome=OUTCOME_ACCEPTED).SerializeToString())
    later = Verdict.FromString(b"\x08\x63")  # outcome = 99

    assert wire_name(Outcome, verdict.outcome) == "accepted"
    assert wire_name(Outcome, later.outcome) == "unknown_99"
    assert wire_number(Outcome, "unknown_99") == 99
    assert wire_number(Outcome, "accepted") == OUTCOME_ACCEPTED
    assert wire_number(Outcome, "of_a_later_release") == 0


def test_a_trajectory_with_an_unknown_outcome_passes_through_the_experience_store() -> None:
    later = Verdict.FromString(b"\x08\x63")
    trajectory = Trajectory(trajectory_id="t", prompt_id="p", source=SOURCE_ONLINE, verdict=later, reward=-1.0)

    (row,) = rows_of(table_of([StoredTrajectory(trajectory, Prompt(prompt_id="p"))]))

    assert row.trajectory.verdict.outcome == 99
