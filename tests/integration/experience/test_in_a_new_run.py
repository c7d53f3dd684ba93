"""Stored experience as another run's own: what holds is kept, what does not is made anew. Real pi0, doubled judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from services.value_estimation.reference import Reference
from services.value_estimation.samples import SampleMaker, ServiceClients, StoredImport, StoredSelections
from spo import redis_keys
from spo.errors import Unreachable
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin, Selection
from spo.model.chat import ChatFormat
from spo.spec.job_spec import JobSpec, RewardSpec, StoredExperience, parse_job_spec, spec_to_json
from spo.testing.runs import RIGHT, WRONG, JudgeDouble, Surroundings
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, SOURCE_ONLINE, SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Annotation, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

RUN, BEFORE = "job_NOW", "job_BEFORE"
PROMPT = Prompt(
    prompt_id="p" * 64,
    text="sum of the even numbers",
    task_set="toy",
    tests_digest="t",
    language="python",
    response_format="raw",
)


@dataclass
class Stage:
    client: redis.Redis
    store: ExperienceStore
    reference: Reference
    judge: JudgeDouble
    clients: ServiceClients
    spec: JobSpec

    def scored(self, number: int, text: str, **changes: Any) -> StoredTrajectory:
        """A trajectory as a run of this very pi0 stores it; its log-probs are recognisable."""
        response_tokens = self.reference.encode_response(text)
        right = text == RIGHT
        fields: dict[str, Any] = {
            "trajectory_id": f"traj_{number}",
            "run_id": BEFORE,
            "prompt_id": PROMPT.prompt_id,
            "source": SOURCE_ONLINE,
            "prompt_token_ids": self.reference.encode_prompt(PROMPT.text),
            "response_token_ids": response_tokens,
            "response_text": text,
            "finish_reason": FINISH_REASON_STOP,
            "sampling_logprobs": [-1.0] * len(response_tokens),
            "reference_logprobs": [-0.25] * len(response_tokens),
            "reference_hash": self.reference.model_hash,
            "policy_version_first": 7,
            "created_unix_ms": number,
            "reward": 0.0 if right else -1.0,
            "verdict": Verdict(
                outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER, judge_version="test", tests_passed=3
            ),
        }
        return StoredTrajectory(Trajectory(**{**fields, **changes}), PROMPT, "float32")

    def put(self, rows: Sequence[StoredTrajectory], run: str = BEFORE, tenant: str = "", kind: str = "run") -> None:
        self.store.write(Origin(run, kind, "toy", self.reference.model_hash, tenant=tenant), "part-1", rows)

    def taken(self, prompt: Prompt = PROMPT, **wanted: Any) -> list[Trajectory]:
        spec = parse_job_spec({**self.spec.model_dump(), "offline": {"experience": [wanted]}})
        self.client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
        selection = StoredSelections(self.client, self.store.url).of(RUN, spec)
        maker = SampleMaker(RUN, self.reference, self.clients, RewardSpec())
        return StoredImport(maker, spec, self.clients.judge_version(prompt)).trajectories(prompt, selection.of(prompt))


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings], tmp_path: Path) -> Stage:
    around = surroundings()
    around.start("job_MODEL")
    spec = around.references.spec("job_MODEL")
    store = ExperienceStore(str(tmp_path / "experience"))
    return Stage(around.client, store, around.references.of("job_MODEL"), around.judge, around.clients, spec)


def test_tokens_logprobs_and_verdicts_that_hold_are_used_as_they_are(stage: Stage) -> None:
    stage.put([stage.scored(1, RIGHT), stage.scored(2, WRONG)])

    found = stage.taken(run=BEFORE)

    assert stage.judge.programs == 0, "the same judge has judged them on the same tests"
    assert sorted(sample.reward for sample in found) == [-1.0, 0.0]
    for sample in found:
        assert set(sample.reference_logprobs) == {-0.25}, "computed once, under the same pi0"
        assert (sample.run_id, sample.source, sample.origin_run_id) == (RUN, SOURCE_OTHER_RUN, BEFORE)
        assert len(sample.parents) == 1
        assert sample.trajectory_id not in sample.parents
        assert sample.policy_version_first == 7
    assert [sample.trajectory_id for sample in stage.taken(run=BEFORE)] == [sample.trajectory_id for sample in found]


def test_what_another_model_wrote_is_tokenised_and_scored_anew(stage: Stage) -> None:
    foreign = stage.scored(
        1, RIGHT, response_token_ids=[5, 6], sampling_logprobs=[-1, -1], reference_logprobs=[-9, -9], reference_hash="x"
    )
    stage.put([foreign])

    (found,) = stage.taken(run=BEFORE)

    assert list(found.response_token_ids) == stage.reference.encode_response(RIGHT)
    assert found.reference_hash == stage.reference.model_hash
    assert len(found.reference_logprobs) == len(found.response_token_ids)
    assert not found.sampling_logprobs
    assert -9 not in found.reference_logprobs


def test_tokens_that_do_not_say_what_the_text_says_are_not_believed(stage: Stage) -> None:
    lied = stage.scored(1, RIGHT)
    lied.trajectory.response_token_ids[0] += 1
    outside = stage.scored(2, WRONG)
    outside.trajectory.response_token_ids[0] = 10**6
    stage.put([lied, outside])

    found = stage.taken(run=BEFORE)

    expected = {tuple(stage.reference.encode_response(text)) for text in (RIGHT, WRONG)}
    assert {tuple(sample.response_token_ids) for sample in found} == expected


def test_a_response_that_was_cut_off_gets_no_end_and_is_left_out_where_it_would_have_gone_on(stage: Stage) -> None:
    cut = stage.scored(1, WRONG, reference_hash="x", finish_reason=FINISH_REASON_LENGTH)
    tokens = stage.reference.encode_response(WRONG, ended=False)
    stage.put([cut])

    def with_limit(limit: int) -> list[Trajectory]:
        model = stage.spec.model.model_copy(update={"max_response_tokens": limit})
        return replace(stage, spec=stage.spec.model_copy(update={"model": model})).taken(run=BEFORE)

    assert [list(found.response_token_ids) for found in with_limit(len(tokens))] == [tokens]
    assert with_limit(len(tokens) + 1) == []


def test_a_response_to_another_system_prompt_becomes_one_to_the_jobs_own(stage: Stage) -> None:
    other = stage.scored(1, RIGHT)
    other.trajectory.prompt_token_ids.insert(0, 5)
    stage.put([other])

    (found,) = stage.taken(run=BEFORE)

    assert list(found.prompt_token_ids) == stage.reference.encode_prompt(PROMPT.text)
    assert -0.25 not in found.reference_logprobs, "they were those under the other prompt"
    assert not found.sampling_logprobs


def test_a_response_that_a_stop_string_would_have_ended_is_left_out(stage: Stage) -> None:
    stage.put([stage.scored(1, RIGHT), stage.scored(2, WRONG)])
    stage.reference = replace(stage.reference, chat=ChatFormat(template="none", stop=("(",)))

    (found,) = stage.taken(run=BEFORE)

    assert found.response_text == RIGHT
    assert list(found.response_token_ids) == stage.reference.encode_response(RIGHT)
    assert stage.reference.pieces(found.response_token_ids)[-1] == "("


@pytest.mark.parametrize(
    "change",
    [
        lambda row: setattr(row.trajectory.verdict, "judge_version", "older"),
        lambda row: setattr(row.prompt, "tests_digest", "weaker tests"),
    ],
    ids=["another judge", "other tests"],
)
def test_a_verdict_that_does_not_hold_is_given_anew(stage: Stage, change: Callable[[StoredTrajectory], None]) -> None:
    row = stage.scored(1, WRONG, reward=0.0)
    prompt = Prompt()
    prompt.CopyFrom(PROMPT)
    row = StoredTrajectory(row.trajectory, prompt, "float32")
    row.trajectory.verdict.outcome = OUTCOME_ACCEPTED
    change(row)
    stage.put([row])

    (found,) = stage.taken(run=BEFORE)

    assert stage.judge.programs == 1
    assert found.reward == -1.0


def test_a_reward_given_at_import_counts_without_a_verdict(stage: Stage) -> None:
    row = stage.scored(1, WRONG, reward=-0.5)
    row.trajectory.ClearField("verdict")
    stage.put([row])

    (found,) = stage.taken(run=BEFORE)

    assert (found.reward, stage.judge.programs) == (-0.5, 0)
    assert found.verdict.outcome == OUTCOME_WRONG_ANSWER


def test_labels_make_a_trajectory_annotated_under_the_same_pi0_only(stage: Stage) -> None:
    labels = [Annotation(position=1, rollouts=8, successes=2)]
    stage.put(
        [stage.scored(1, RIGHT, annotations=labels), stage.scored(2, WRONG, annotations=labels, reference_hash="x")]
    )

    by_text = {sample.response_text: sample for sample in stage.taken(run=BEFORE)}

    assert by_text[RIGHT].source == SOURCE_ANNOTATED
    assert list(by_text[RIGHT].annotations) == labels
    assert by_text[WRONG].source == SOURCE_OTHER_RUN
    assert not by_text[WRONG].annotations


def test_a_prompt_takes_successes_and_failures_in_turn_newest_first_and_nothing_twice(stage: Stage) -> None:
    rows = [stage.scored(n, RIGHT + " " * n, verdict=Verdict(outcome=1, judge_version="test")) for n in range(9)]
    rows += [stage.scored(100 + n, WRONG + str(n)) for n in range(5)]
    stage.put(rows)

    index = StoredSelections(stage.client, stage.store.url)
    spec = parse_job_spec({**stage.spec.model_dump(), "offline": {"experience": [{"per_prompt": 3}]}})
    chosen = sorted(row.trajectory.trajectory_id for row in index.of("job_OTHER", spec).of(PROMPT))

    assert chosen == ["traj_103", "traj_104", "traj_8"], "one success: the others differ in spaces alone"
    assert len(stage.taken(correct_only=True)) == 1
    assert stage.taken(Prompt(prompt_id="q" * 64, text="something else")) == []


def test_what_several_people_said_of_the_same_answer_counts_as_often_as_they_said_it(stage: Stage) -> None:
    rows = [stage.scored(n, WRONG, said_by=f"person {n}", reward=0.0 if n == 1 else -1.0) for n in range(4)]
    for row in rows:
        row.trajectory.ClearField("verdict")
    stage.put(rows, run="traffic", kind="traffic")

    found = stage.taken(run="traffic")

    assert sorted(sample.reward for sample in found) == [-1.0, -1.0, -1.0, 0.0]
    assert {sample.said_by for sample in found} == {f"person {n}" for n in range(4)}


def test_what_does_not_fit_the_model_is_left_out(stage: Stage) -> None:
    stage.put([stage.scored(1, RIGHT * 60), stage.scored(2, WRONG)])

    assert [sample.response_text for sample in stage.taken(run=BEFORE)] == [WRONG]


def test_another_tenants_experience_is_not_there(stage: Stage) -> None:
    stage.put([stage.scored(1, RIGHT)], run="job_THEIRS", tenant="them")
    assert stage.taken() == []

    stage.client.hset(redis_keys.job_record(RUN), "tenant", "them")
    assert len(stage.taken()) == 1


def test_of_published_wrong_solutions_those_that_the_judge_rejects_are_kept(stage: Stage) -> None:
    maker = SampleMaker(RUN, stage.reference, stage.clients, RewardSpec())

    found = maker.import_human(PROMPT, [WRONG, RIGHT, WRONG * 60, WRONG + "1"], 44, correct=False)

    assert [(sample.response_text, sample.reward) for sample in found] == [(WRONG, -1.0), (WRONG + "1", -1.0)]
    assert all(len(sample.reference_logprobs) == len(sample.response_token_ids) for sample in found)


def test_experience_that_is_pruned_meanwhile_is_not_asked_for_again(stage: Stage) -> None:
    stage.put([stage.scored(1, RIGHT)])
    stage.put([stage.scored(2, WRONG)], run="job_KEPT")
    selection = Selection(stage.store, [StoredExperience()])
    assert len(selection.of(PROMPT)) == 2
    for file in stage.store.files(BEFORE):
        stage.store.remove(file)

    with pytest.raises(Unreachable):
        selection.of(PROMPT)

    assert [row.trajectory.response_text for row in selection.of(PROMPT)] == [WRONG]
