"""Stored experience as a job's own offline trajectories: checked, and judged and scored where that is needed.

What is still valid is kept: tokens and log-probs of the same pi0 at the same precision, a verdict of the same judge on
the same tests. The rest is made again from the text, which is all that other models and people have in common.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.value_estimation.samples import REFERENCE_VERSION, SampleMaker
from spo import redis_keys
from spo.errors import InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.selection import Selection
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import run_tenant
from spo.model.segments import reasoning_characters, segment_faults, turns
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec
from spo.spec.reward import is_success, needs_all_tests
from spo.tasks.verifier_pool import is_of_pool
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, SOURCE_HUMAN, SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

log = get_logger("experience")

REMEMBERED_RUNS = 4


class StoredSelections:
    """What running jobs use of the experience store; the store is searched once per run."""

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
        """Judged and scored trajectories of this run on the prompt; those that its model cannot take are left out.

        Raises NotReady when the judge was away too long.
        """
        # The same pi0 may have been asked with another template or system prompt.
        asked = self.maker.reference.encode_prompt(prompt.text)
        writable = [row for row in stored if self._can_be_taken(prompt, row)]
        adopted = [(row, self._adopt(prompt, asked, row)) for row in writable]
        fitting = [(row, trajectory) for row, trajectory in adopted if self._fits(trajectory)]
        unjudged = [trajectory for row, trajectory in fitting if not self._judged_alike(prompt, row)]
        for trajectory in unjudged:
            # What another judge said decides nothing here.
            trajectory.ClearField("verdict")
        if unjudged:
            self.maker.judge(prompt, unjudged)
        for row, trajectory in fitting:
            if self._judged_alike(prompt, row):
                self._reward(trajectory)
        unscored = [trajectory for row, trajectory in fitting if not self._scored_alike(row, trajectory)]
        if unscored:
            self.maker.score(unscored)
        if len(fitting) < len(stored):
            log.info("stored experience left out", prompt=prompt.prompt_id[:12], given=len(stored), kept=len(fitting))
        return [trajectory for _, trajectory in fitting]

    def _adopt(self, prompt: Prompt, asked: Sequence[int], row: StoredTrajectory) -> Trajectory:
        """A copy for this run: an id of its own, the tokens of its pi0, and where the trajectory came from."""
        was, run_id = row.trajectory, self.maker.run_id
        adopted = Trajectory()
        adopted.CopyFrom(was)
        if not was.segments:
            # Its end is a token and no text, whatever a file says.
            adopted.response_text = self.maker.reference.without_end(was.response_text)
        if was.segments or prompt.environment:
            self._place(adopted)
        elif adopted.prompt_token_ids != asked or not self._tokens_are_ours(row):
            self._encode(asked, adopted)
        labelled = bool(adopted.annotations) and self._same_problem(prompt, row)
        if not labelled:
            del adopted.annotations[:]
        origin = was.origin_run_id or was.run_id
        adopted.trajectory_id = redis_keys.trajectory_id(
            run_id, f"{origin}/{was.trajectory_id}", was.sample_index, was.attempt, REFERENCE_VERSION
        )
        # The answer is read as this job reads its own.
        context = [*adopted.prompt_token_ids, *adopted.response_token_ids]
        adopted.reasoning_characters = reasoning_characters(
            adopted,
            lambda text, after: self.maker.reference.reasoning_length(
                context[: len(adopted.prompt_token_ids) + after], text
            ),
        )
        adopted.run_id = run_id
        adopted.prompt_id = prompt.prompt_id
        adopted.source = SOURCE_ANNOTATED if labelled else SOURCE_OTHER_RUN
        adopted.origin_run_id = origin
        adopted.parents[:] = [was.trajectory_id]
        del adopted.hops[:]
        return adopted

    def _can_be_taken(self, prompt: Prompt, row: StoredTrajectory) -> bool:
        """Whether the job could have sampled it; of a conversation also: with its environment and its very tokens.

        A conversation is never tokenised again: what was sampled is what is trained.
        """
        held, was, text = row.trajectory, row.prompt, row.trajectory.response_text
        if not (held.segments or was.environment or prompt.environment):
            # One of the job's stop strings would have ended it earlier.
            return self.maker.reference.chat.cut(text) == text
        alike = (was.environment, was.environment_json) == (prompt.environment, prompt.environment_json)
        # An import names no environment.
        return (alike or bool(held.segments and not was.environment)) and self._is_ours(held)

    def _is_ours(self, held: Trajectory) -> bool:
        """Whether the tokens of a conversation are of the same pi0, and read as what its turns say."""
        reference, tokens = self.maker.reference, held.response_token_ids
        if held.reference_hash != reference.model_hash or not (held.prompt_token_ids and tokens):
            return False
        if segment_faults(held.segments, len(tokens), None):
            return False
        try:
            if held.segments and not _is_placed(held):
                return reference.read(tokens) == held.response_text
            if not held.segments:
                return reference.reads(tokens, held.response_text)
            said = [turn for turn in turns(held) if turn.is_action and turn.end > turn.first]
            return all(reference.reads(tokens[turn.first : turn.end], turn.text) for turn in said)
        except InvalidInput:
            return False

    def _place(self, held: Trajectory) -> None:
        """Say where the turns stand in the text, where an import knew only their tokens."""
        if _is_placed(held):
            return
        ends = accumulate(segment.tokens for segment in held.segments)
        begun = 0
        for segment, end in zip(held.segments, ends, strict=True):
            # Half a character at the end of a turn reads as one more.
            said = min(len(self.maker.reference.read(held.response_token_ids[:end])), len(held.response_text))
            segment.characters = max(said - begun, 0)
            begun += segment.characters

    def _encode(self, asked: Sequence[int], trajectory: Trajectory) -> None:
        # What was cut off has no end.
        ended = trajectory.finish_reason != FINISH_REASON_LENGTH
        trajectory.prompt_token_ids[:] = asked
        trajectory.response_token_ids[:] = self.maker.reference.encode_response(trajectory.response_text, ended=ended)
        trajectory.reference_hash = ""
        del trajectory.sampling_logprobs[:], trajectory.reference_logprobs[:], trajectory.annotations[:]

    def _tokens_are_ours(self, row: StoredTrajectory) -> bool:
        """Whether its tokens are of the same pi0 and read as its text; a file can claim anything."""
        trajectory, reference = row.trajectory, self.maker.reference
        if trajectory.reference_hash != reference.model_hash or not trajectory.response_token_ids:
            return False
        try:
            return reference.reads(trajectory.response_token_ids, trajectory.response_text)
        except InvalidInput:
            return False

    def _same_problem(self, prompt: Prompt, row: StoredTrajectory) -> bool:
        """Whether tests and pi0 are the same: annotations hold for these only."""
        ours = self.maker.reference.model_hash
        return row.prompt.tests_digest == prompt.tests_digest and row.trajectory.reference_hash == ours

    def _fits(self, trajectory: Trajectory) -> bool:
        """Whether the job could have sampled it; what a shorter limit has cut off is the beginning of a response.

        Its reward is that of no response: Q of a prefix would be taught to be it.
        """
        limits = self.spec.model
        cut_off = trajectory.finish_reason == FINISH_REASON_LENGTH and not trajectory.segments
        if cut_off and len(trajectory.response_token_ids) < limits.max_response_tokens:
            return False
        try:
            self.maker.reference.check(trajectory.prompt_token_ids, trajectory.response_token_ids)
        except InvalidInput:
            return False
        return (
            len(trajectory.prompt_token_ids) <= limits.max_prompt_tokens
            and len(trajectory.response_token_ids) <= limits.max_response_tokens
        )

    def _judged_alike(self, prompt: Prompt, row: StoredTrajectory) -> bool:
        """Whether this judge judged it on these tests, or it was imported with a reward."""
        verdict = row.trajectory.verdict
        if row.prompt.tests_digest != prompt.tests_digest:
            return False
        if not row.trajectory.HasField("verdict"):
            return row.trajectory.HasField("reward")
        if row.prompt.environment:
            # What the environment said of it rests on the same judge.
            return True
        if row.trajectory.source == SOURCE_HUMAN and not self.spec.offline.judge_human_solutions:
            return True
        if needs_all_tests(self.spec.tasks.reward) and verdict.outcome != OUTCOME_ACCEPTED:
            # It may have been judged only to its first failure.
            return False
        return is_of_pool(verdict.judge_version, self.judge_version)

    def _scored_alike(self, row: StoredTrajectory, trajectory: Trajectory) -> bool:
        same = row.reference_dtype == self.spec.model.dtype
        return same and len(trajectory.reference_logprobs) == len(trajectory.response_token_ids)

    def _reward(self, trajectory: Trajectory) -> None:
        if trajectory.HasField("verdict"):
            self.maker.reward(trajectory)
            return
        outcome = OUTCOME_ACCEPTED if is_success(trajectory.reward) else OUTCOME_WRONG_ANSWER
        trajectory.verdict.CopyFrom(Verdict(outcome=outcome, detail="rewarded when it was imported"))


def _is_placed(held: Trajectory) -> bool:
    """Whether its turns hold all of its text."""
    return sum(segment.characters for segment in held.segments) == len(held.response_text)
