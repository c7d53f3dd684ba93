"""Judged and scored trajectories of a prompt: samples of pi0, programs by people and stored experience, and the
services asked for them.

Stored experience as a job's own offline trajectories: checked, and judged and scored where that is needed.
What is still valid is kept: tokens and log-probs of the same pi0 at the same precision, a verdict of the same judge on
the same tests. The rest is made again from the text, which is all that other models and people have in common.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from google.protobuf.message import Message

from services.value_estimation.reference import Reference
from services.value_estimation.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput, NotFound, NotReady
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Selection
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_tenant
from spo.model.chat import keep_sampled_logprobs, reasoning_characters, segment_faults, turns
from spo.observability import get_logger
from spo.rpc.client import Answer, RpcClient, chunks_by_bytes, generate, judge
from spo.rpc.pools import InferenceClient, JudgePools
from spo.spec.job_spec import JobSpec, RewardSpec
from spo.spec.reward import is_success, needs_all_tests, require_decided, reward_of
from spo.tasks.problem import has_verdict, program_of, write_response
from spo.tasks.verifier import is_of_pool, judges_named
from spo.v1 import prompt_pb2 as wire
from spo.v1.judge_service_pb2 import (
    PRIORITY_TRAINING,
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    JudgeResponse,
)
from spo.v1.replay_service_pb2 import (
    AppendRequest,
    GetTrajectoryRequest,
    GetTrajectoryResponse,
    ListTrajectoriesRequest,
    ListTrajectoriesResponse,
)
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, OUTCOME_WRONG_ANSWER, Verdict

SHORT_DEADLINE_SECONDS = 30.0
PAGE = 500
# The replicas still serve another run: one of them will be assigned to this one.
PASSING_CODES = frozenset({"other_run"})

log = get_logger("samples")

REFERENCE_VERSION = 0

REMEMBERED_RUNS = 4


@dataclass
class Signs:
    """Signs of life of a call, over all its attempts."""

    count: int = 0

    def note(self) -> None:
        """One more."""
        self.count += 1


@dataclass(frozen=True)
class ServiceClients:
    """Inference, judge and replay buffer; calls give up once `wanted` is false."""

    inference: RpcClient
    judge: JudgePools
    replay: RpcClient
    settings: Settings
    stop: threading.Event
    wanted: Callable[[], bool] = lambda: True

    def generate(self, group: wire.PromptGroup) -> list[Trajectory]:
        """Sample a group. Raises NotReady when inference stays away for patience_seconds."""
        kept: dict[int, Trajectory] = {}
        signs = Signs()
        return self._insist(
            self.inference,
            lambda: generate(self.inference, group, kept=kept, wanted=self._is_wanted, alive=signs.note),
            signs,
        )

    def judge_programs(
        self, prompt: wire.Prompt, programs: Sequence[str], *, all_tests: bool, run_id: str
    ) -> list[Verdict]:
        """A verdict per program; equal programs are sent once. all_tests: go on after a failed test."""
        unique = list(dict.fromkeys(programs))
        if not unique:
            return []
        request = JudgeRequest(
            programs=unique,
            language=prompt.language,
            tests_digest=prompt.tests_digest,
            priority=PRIORITY_TRAINING,
            want_details=all_tests,
            run_id=run_id,
        )
        judges, signs = self.judge.of(prompt.verifier_pool), Signs()
        response: JudgeResponse = self._insist(
            judges, lambda: judge(judges, request, wanted=self._is_wanted, alive=signs.note), signs
        )
        by_program = dict(zip(unique, response.verdicts, strict=True))
        require_decided(response.verdicts)
        if any(verdict.outcome == OUTCOME_INTERNAL_ERROR for verdict in response.verdicts):
            # No verdict on the program, so no reward: the prompt is tried again.
            raise NotReady("the judge could not decide on a program", code="judge_fault")
        return [by_program[program] for program in programs]

    def judge_version(self, prompt: wire.Prompt) -> str:
        """The version under which verdicts and values of a prompt are kept."""
        response: DescribeJudgeResponse = self._ask(
            self.judge.of(prompt.verifier_pool), "DescribeJudge", DescribeJudgeRequest(), SHORT_DEADLINE_SECONDS
        )
        return response.judge_version

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Store judged and scored trajectories; repeating it changes nothing."""
        for chunk in chunks_by_bytes([trajectory.ByteSize() for trajectory in trajectories]):
            request = AppendRequest(run_id=run_id, trajectories=trajectories[chunk])
            self._ask(self.replay, "Append", request, SHORT_DEADLINE_SECONDS)

    def stored_samples(
        self, run_id: str, prompt_id: str, source: wire.Source.ValueType = wire.SOURCE_REFERENCE
    ) -> list[Trajectory]:
        """The samples of a prompt in a run's buffer, oldest first; none when the run is gone."""
        request = ListTrajectoriesRequest(run_id=run_id, prompt_id=prompt_id, source=source, limit=PAGE)
        found: list[Trajectory] = []
        try:
            while True:
                page: ListTrajectoriesResponse = self._ask(
                    self.replay, "ListTrajectories", request, SHORT_DEADLINE_SECONDS
                )
                found += page.trajectories
                request.cursor = page.next_cursor
                if not page.next_cursor:
                    return found[::-1]
        except NotFound:
            return []

    def some_samples(self, run_id: str, prompt_id: str, limit: int) -> list[Trajectory]:
        """The newest samples of pi0 on a prompt in a run's buffer."""
        request = ListTrajectoriesRequest(run_id=run_id, prompt_id=prompt_id, source=wire.SOURCE_REFERENCE, limit=limit)
        page: ListTrajectoriesResponse = self._ask(self.replay, "ListTrajectories", request, SHORT_DEADLINE_SECONDS)
        return list(page.trajectories)

    def trajectory(self, run_id: str, trajectory_id: str) -> Trajectory:
        """One trajectory of a run's buffer. Raises NotFound."""
        request = GetTrajectoryRequest(run_id=run_id, trajectory_id=trajectory_id)
        found: GetTrajectoryResponse = self._ask(self.replay, "GetTrajectory", request, SHORT_DEADLINE_SECONDS)
        return found.trajectory

    def _is_wanted(self) -> bool:
        return not self.stop.is_set() and self.wanted()

    def _insist(self, client: RpcClient, attempt: Callable[[], Answer], signs: Signs) -> Answer:
        return client.patiently(
            attempt,
            patience_seconds=self.settings.patience_seconds,
            stop=self.stop,
            wanted=self.wanted,
            passing=PASSING_CODES,
            signs=lambda: signs.count,
        )

    def _ask(self, client: RpcClient, method: str, request: Message, deadline_seconds: float) -> Any:
        return client.call_patiently(
            method,
            request,
            deadline_seconds,
            patience_seconds=self.settings.patience_seconds,
            stop=self.stop,
            wanted=self.wanted,
            passing=PASSING_CODES,
        )


def connect_clients(settings: Settings, stop: threading.Event, registry: RedisClient) -> ServiceClients:
    """Clients at the addresses of the settings; inference also at those in the registry of replicas."""
    return ServiceClients(
        InferenceClient(settings.inference_address, registry),
        JudgePools(settings.sandbox_judge_address, settings.verifier_address),
        RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        settings,
        stop,
    )


@dataclass(frozen=True)
class SampleMaker:
    """Makes the offline trajectories of one run."""

    run_id: str
    reference: Reference
    clients: ServiceClients
    reward_spec: RewardSpec
    # Whether what pi0 samples keeps the sampler's log-probs (`trainer.reference: sampler`).
    keeps_sampled: bool = False

    def sample_reference(
        self, prompt: wire.Prompt, sampling: wire.Sampling, name: str, prefix: Sequence[int] = ()
    ) -> list[Trajectory]:
        """Samples of pi0 that continue the response tokens of `prefix`, judged and scored.

        Their ids are made of `name`, so sampling the same name again makes the same trajectories. Raises InvalidInput
        (code "prefix_of_conversation") for a prefix where an environment would have to take up its state.
        """
        if prefix and prompt.environment:
            raise InvalidInput(
                f"prompt {prompt.prompt_id} is answered in the environment {prompt.environment!r}, which cannot go on "
                "from a prefix",
                code="prefix_of_conversation",
            )
        group = wire.PromptGroup(
            group_id=f"{name}-{prompt.prompt_id[:24]}",
            run_id=self.run_id,
            prompt=prompt,
            sampling=sampling,
            policy_version=REFERENCE_VERSION,
            source=wire.SOURCE_REFERENCE,
            dispatched_unix_ms=int(time.time() * 1000),
            response_prefix_token_ids=prefix,
        )
        trajectories = self.clients.generate(group)
        self.judge(prompt, trajectories)
        self.score([each for each in trajectories if not (self.keeps_sampled and keep_sampled_logprobs(each))])
        return trajectories

    def recall_reference(self, prompt: wire.Prompt, origin: str) -> list[Trajectory]:
        """Samples of pi0 that an earlier run at the same precision has stored, as this run's own.

        Their reference log-probs are kept: on a large model they are the expensive part.
        """
        trajectories = self.clients.stored_samples(origin, prompt.prompt_id)
        for trajectory in trajectories:
            trajectory.run_id = self.run_id
            trajectory.trajectory_id = redis_keys.trajectory_id(
                self.run_id, f"{origin}/{trajectory.trajectory_id}", trajectory.sample_index, 0, REFERENCE_VERSION
            )
            trajectory.origin_run_id = trajectory.origin_run_id or origin
        self.score([trajectory for trajectory in trajectories if not self._is_scored(trajectory)])
        return trajectories

    def _is_scored(self, trajectory: Trajectory) -> bool:
        known, needed = len(trajectory.reference_logprobs), len(trajectory.response_token_ids)
        return known == needed and trajectory.reference_hash == self.reference.model_hash

    def import_human(
        self,
        prompt: wire.Prompt,
        programs: Sequence[str],
        max_response_tokens: int,
        *,
        correct: bool = True,
        judged: bool = True,
    ) -> list[Trajectory]:
        """People's programs as trajectories: those that the judge accepts, or with correct=False those that it rejects.

        Programs of more than max_response_tokens, or with a stop string in them, are left out, and all of a prompt that
        an environment answers: its conversations begin with what it says. judged=False takes
        programs that were published as correct for correct; their verdicts name no judge, so a later run judges them.
        """
        kind = "human" if correct else "wrong"
        if prompt.environment and programs:
            log.info("solutions are left out: they are no conversations", prompt=prompt.prompt_id[:12])
            return []
        texts = [write_solution(program, prompt) for program in programs]
        candidates = [
            self._human(prompt, text, kind, index)
            for index, text in enumerate(texts)
            if self.reference.chat.cut(text) == text
        ]
        fitting = [found for found in candidates if len(found.response_token_ids) <= max_response_tokens]
        if not fitting:
            return []
        if judged:
            self.judge(prompt, fitting)
        else:
            for trajectory in fitting:
                trajectory.verdict.outcome = OUTCOME_ACCEPTED
                self.reward(trajectory)
        kept = [found for found in fitting if (found.verdict.outcome == OUTCOME_ACCEPTED) == correct]
        if len(kept) < len(programs):
            log.info(f"{kind} solutions left out", prompt=prompt.prompt_id[:12], given=len(programs), kept=len(kept))
        self.score(kept)
        return kept

    def _human(self, prompt: wire.Prompt, text: str, kind: str, index: int) -> Trajectory:
        group_id = f"{kind}-{prompt.prompt_id[:24]}"
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(self.run_id, group_id, index, 0, REFERENCE_VERSION),
            group_id=group_id,
            run_id=self.run_id,
            prompt_id=prompt.prompt_id,
            sample_index=index,
            source=wire.SOURCE_HUMAN,
            prompt_token_ids=self.reference.encode_prompt(prompt.text),
            response_token_ids=self.reference.encode_response(text),
            response_text=text,
            finish_reason=FINISH_REASON_STOP,
            sampler="human",
            created_unix_ms=int(time.time() * 1000),
        )

    def judge(self, prompt: wire.Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Set rewards, and verdicts where no environment has; raises NotReady when the judge is away too long."""
        undecided = [trajectory for trajectory in trajectories if not has_verdict(trajectory)]
        programs = [program_of(sample, prompt.response_format, prompt.language) for sample in undecided]
        verdicts = self.clients.judge_programs(
            prompt, programs, all_tests=needs_all_tests(self.reward_spec), run_id=self.run_id
        )
        for trajectory, verdict in zip(undecided, verdicts, strict=True):
            trajectory.verdict.CopyFrom(verdict)
        for trajectory in trajectories:
            # The counts of passed tests are enough; this keeps trajectories small.
            del trajectory.verdict.tests[:]
            self.reward(trajectory)
            trajectory.hops.append(Hop(service=judges_named(prompt.verifier_pool), at_unix_ms=int(time.time() * 1000)))

    def reward(self, trajectory: Trajectory) -> None:
        """Set the reward of its verdict by this run's rule."""
        trajectory.reward = reward_of(trajectory.verdict, self.reward_spec)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the reference log-probs (nats) and the reference's hash."""
        scored = self.reference.logprobs(
            [trajectory.prompt_token_ids for trajectory in trajectories],
            [trajectory.response_token_ids for trajectory in trajectories],
            [trajectory.segments for trajectory in trajectories],
        )
        for trajectory, logprobs in zip(trajectories, scored, strict=True):
            trajectory.reference_logprobs[:] = logprobs
            trajectory.reference_hash = self.reference.model_hash
            trajectory.hops.append(Hop(service="value-estimation", at_unix_ms=int(time.time() * 1000)))


def write_solution(program: str, prompt: wire.Prompt) -> str:
    """A person's program in the format of a response to the prompt."""
    return write_response(program, "raw" if prompt.response_format == "raw" else "fenced", prompt.language)


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

    def trajectories(self, prompt: wire.Prompt, stored: Sequence[StoredTrajectory]) -> list[Trajectory]:
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

    def _adopt(self, prompt: wire.Prompt, asked: Sequence[int], row: StoredTrajectory) -> Trajectory:
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
        adopted.source = wire.SOURCE_ANNOTATED if labelled else wire.SOURCE_OTHER_RUN
        adopted.origin_run_id = origin
        adopted.parents[:] = [was.trajectory_id]
        del adopted.hops[:]
        return adopted

    def _can_be_taken(self, prompt: wire.Prompt, row: StoredTrajectory) -> bool:
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

    def _same_problem(self, prompt: wire.Prompt, row: StoredTrajectory) -> bool:
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

    def _judged_alike(self, prompt: wire.Prompt, row: StoredTrajectory) -> bool:
        """Whether this judge judged it on these tests, or it was imported with a reward."""
        verdict = row.trajectory.verdict
        if row.prompt.tests_digest != prompt.tests_digest:
            return False
        if not row.trajectory.HasField("verdict"):
            return row.trajectory.HasField("reward")
        if row.prompt.environment:
            # What the environment said of it rests on the same judge.
            return True
        if row.trajectory.source == wire.SOURCE_HUMAN and not self.spec.offline.judge_human_solutions:
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
