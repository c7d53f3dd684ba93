"""Stored experience as a job's own offline trajectories: recalled, checked, judged and scored where that is needed.

What is known stays: tokens and log-probs under the same pi0 in the same precision, a verdict of the same judge on the
same tests. What is not is made anew from the text, which is all that other models and people have in common.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.value_estimation.samples import REFERENCE_VERSION, SampleMaker
from spo import redis_keys
from spo.errors import InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.selection import Selection
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import run_tenant
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec
from spo.spec.reward import is_success, needs_all_tests
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, SOURCE_HUMAN, SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

log = get_logger("experience")

REMEMBERED_RUNS = 4


class StoredSelections:
    """What the runs in progress take from the experience store; each run looks through it once."""

    def __init__(self, client: RedisClient, place: str) -> None:
        self.client = client
        self.place = place
        self._selections: OrderedDict[str, Selection] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run_id: str, spec: JobSpec) -> Selection:
        """The run's selection. Raises InvalidInput when the store's URL cannot be opened."""
        with self._lock:
            if run_id not in self._selections:
                self._selections[run_id] = Selection(
                    ExperienceStore(self.place),
                    spec.offline.experience,
                    job_id=run_id,
                    tenant=run_tenant(self.client, run_id) or "",
                )
                while len(self._selections) > REMEMBERED_RUNS:
                    self._selections.popitem(last=False)
            return self._selections[run_id]


@dataclass(frozen=True)
class StoredImport:
    """Makes stored trajectories those of one run."""

    maker: SampleMaker
    spec: JobSpec
    judge_version: str

    def trajectories(self, prompt: Prompt, stored: Sequence[StoredTrajectory]) -> list[Trajectory]:
        """Judged and scored trajectories of this run on the prompt; what its model cannot read is left out, and logged.

        Raises NotReady when the judge stayed away.
        """
        adopted = [(row, self._adopt(prompt, row)) for row in stored]
        fitting = [(row, each) for row, each in adopted if self._fits(each)]
        unjudged = [each for row, each in fitting if not self._judged_alike(prompt, row)]
        if unjudged:
            self.maker.judge(prompt, unjudged)
        for row, each in fitting:
            if self._judged_alike(prompt, row):
                self._reward(each)
        unscored = [each for row, each in fitting if not self._scored_alike(row, each)]
        if unscored:
            self.maker.score(unscored)
        if len(fitting) < len(stored):
            log.info("stored experience left out", prompt=prompt.prompt_id[:12], given=len(stored), kept=len(fitting))
        return [each for _, each in fitting]

    def _adopt(self, prompt: Prompt, row: StoredTrajectory) -> Trajectory:
        """A copy under an id of this run's, with tokens of this run's pi0 and the lineage of where it came from."""
        was, run_id = row.trajectory, self.maker.run_id
        adopted = Trajectory()
        adopted.CopyFrom(was)
        if not self._tokens_are_ours(row):
            self._encode(prompt, adopted)
        labelled = bool(adopted.annotations) and self._same_problem(prompt, row)
        if not labelled:
            del adopted.annotations[:]
        origin = was.origin_run_id or was.run_id
        adopted.trajectory_id = redis_keys.trajectory_id(
            run_id, f"{origin}/{was.trajectory_id}", was.sample_index, was.attempt, REFERENCE_VERSION
        )
        adopted.run_id = run_id
        adopted.prompt_id = prompt.prompt_id
        adopted.source = SOURCE_ANNOTATED if labelled else SOURCE_OTHER_RUN
        adopted.origin_run_id = origin
        adopted.parents[:] = [was.trajectory_id]
        del adopted.hops[:]
        return adopted

    def _encode(self, prompt: Prompt, trajectory: Trajectory) -> None:
        prompt_tokens, response_tokens = self.maker.reference.encode(prompt.text, trajectory.response_text)
        if trajectory.finish_reason == FINISH_REASON_LENGTH:
            # It was cut off: its end is not the end of the response.
            response_tokens = response_tokens[:-1]
        trajectory.prompt_token_ids[:] = prompt_tokens
        trajectory.response_token_ids[:] = response_tokens
        trajectory.reference_hash = ""
        del trajectory.sampling_logprobs[:], trajectory.reference_logprobs[:], trajectory.annotations[:]

    def _tokens_are_ours(self, row: StoredTrajectory) -> bool:
        """Tokens of the same pi0 that say what the text says; a file can claim anything."""
        trajectory, reference = row.trajectory, self.maker.reference
        if trajectory.reference_hash != reference.model_hash or not trajectory.response_token_ids:
            return False
        try:
            return reference.reads(trajectory.response_token_ids, trajectory.response_text)
        except InvalidInput:
            return False

    def _same_problem(self, prompt: Prompt, row: StoredTrajectory) -> bool:
        """The same tests, and the same pi0, which the annotations are about."""
        ours = self.maker.reference.model_hash
        return row.prompt.tests_digest == prompt.tests_digest and row.trajectory.reference_hash == ours

    def _fits(self, trajectory: Trajectory) -> bool:
        limits = self.spec.model
        try:
            self.maker.reference.check(trajectory.prompt_token_ids, trajectory.response_token_ids)
        except InvalidInput:
            return False
        return (
            len(trajectory.prompt_token_ids) <= limits.max_prompt_tokens
            and len(trajectory.response_token_ids) <= limits.max_response_tokens
        )

    def _judged_alike(self, prompt: Prompt, row: StoredTrajectory) -> bool:
        """Judged by this judge on these tests, or rewarded by whoever imported it."""
        verdict = row.trajectory.verdict
        if row.prompt.tests_digest != prompt.tests_digest:
            return False
        if not row.trajectory.HasField("verdict"):
            return row.trajectory.HasField("reward")
        if row.trajectory.source == SOURCE_HUMAN and not self.spec.offline.judge_human_solutions:
            return True
        if needs_all_tests(self.spec.tasks.reward) and verdict.outcome != OUTCOME_ACCEPTED:
            # It may have been judged only to its first failure.
            return False
        return verdict.judge_version == self.judge_version

    def _scored_alike(self, row: StoredTrajectory, trajectory: Trajectory) -> bool:
        same = row.reference_dtype == self.spec.model.dtype
        return same and len(trajectory.reference_logprobs) == len(trajectory.response_token_ids)

    def _reward(self, trajectory: Trajectory) -> None:
        if trajectory.HasField("verdict"):
            self.maker.reward(trajectory)
            return
        outcome = OUTCOME_ACCEPTED if is_success(trajectory.reward) else OUTCOME_WRONG_ANSWER
        trajectory.verdict.CopyFrom(Verdict(outcome=outcome, detail="rewarded when it was imported"))
