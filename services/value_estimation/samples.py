"""From a prompt to judged and scored trajectories of pi0, and of people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.value_estimation.reference import Reference
from services.value_estimation.service_clients import ServiceClients
from spo import redis_keys
from spo.observability.logs import get_logger
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import extract_program, write_response
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_REFERENCE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Hop, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

log = get_logger("samples")

REFERENCE_VERSION = 0


@dataclass(frozen=True)
class SampleMaker:
    """Makes the offline trajectories of one run."""

    run_id: str
    reference: Reference
    clients: ServiceClients
    reward_spec: RewardSpec

    def sample_reference(
        self, prompt: Prompt, sampling: Sampling, name: str, prefix: Sequence[int] = ()
    ) -> list[Trajectory]:
        """Samples of pi0, judged and scored; `name` makes their ids, so a repeated chunk is the same chunk.

        They go on from the response tokens of `prefix`.
        """
        group = PromptGroup(
            group_id=f"{name}-{prompt.prompt_id[:24]}",
            run_id=self.run_id,
            prompt=prompt,
            sampling=sampling,
            policy_version=REFERENCE_VERSION,
            source=SOURCE_REFERENCE,
            dispatched_unix_ms=int(time.time() * 1000),
            response_prefix_token_ids=prefix,
        )
        trajectories = self.clients.generate(group)
        self.judge(prompt, trajectories)
        self.score(trajectories)
        return trajectories

    def recall_reference(self, prompt: Prompt, origin: str) -> list[Trajectory]:
        """Samples of pi0 that an earlier run at the same precision has stored, as this run's own.

        Their log-probs come with them: on a large model they are the dear part.
        """
        trajectories = self.clients.stored_samples(origin, prompt.prompt_id)
        for trajectory in trajectories:
            trajectory.run_id = self.run_id
            trajectory.trajectory_id = redis_keys.trajectory_id(
                self.run_id, f"{origin}/{trajectory.trajectory_id}", trajectory.sample_index, 0, REFERENCE_VERSION
            )
            trajectory.origin_run_id = trajectory.origin_run_id or origin
        self.score([each for each in trajectories if not self._is_scored(each)])
        return trajectories

    def _is_scored(self, trajectory: Trajectory) -> bool:
        known, needed = len(trajectory.reference_logprobs), len(trajectory.response_token_ids)
        return known == needed and trajectory.reference_hash == self.reference.model_hash

    def import_human(
        self, prompt: Prompt, programs: Sequence[str], max_response_tokens: int, right: bool = True, judged: bool = True
    ) -> list[Trajectory]:
        """People's programs as trajectories: those the judge accepts, or of published wrong ones those it rejects.

        Longer ones than the run's limit are left out. Not `judged`: they are right because they were published as that;
        their verdicts name no judge, so a later run judges them.
        """
        kind = "human" if right else "wrong"
        candidates = [self._human(prompt, program, kind, index) for index, program in enumerate(programs)]
        fitting = [each for each in candidates if len(each.response_token_ids) <= max_response_tokens]
        if not fitting:
            return []
        if judged:
            self.judge(prompt, fitting)
        for each in () if judged else fitting:
            each.verdict.outcome = OUTCOME_ACCEPTED
            self.reward(each)
        kept = [each for each in fitting if (each.verdict.outcome == OUTCOME_ACCEPTED) == right]
        if len(kept) < len(programs):
            log.info(f"{kind} solutions left out", prompt=prompt.prompt_id[:12], given=len(programs), kept=len(kept))
        self.score(kept)
        return kept

    def _human(self, prompt: Prompt, program: str, kind: str, index: int) -> Trajectory:
        text = write_solution(program, prompt)
        prompt_tokens, response_tokens = self.reference.encode(prompt.text, text)
        group_id = f"{kind}-{prompt.prompt_id[:24]}"
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(self.run_id, group_id, index, 0, REFERENCE_VERSION),
            group_id=group_id,
            run_id=self.run_id,
            prompt_id=prompt.prompt_id,
            sample_index=index,
            source=SOURCE_HUMAN,
            prompt_token_ids=prompt_tokens,
            response_token_ids=response_tokens,
            response_text=text,
            finish_reason=FINISH_REASON_STOP,
            sampler="human",
            created_unix_ms=int(time.time() * 1000),
        )

    def judge(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Set verdicts and rewards. Raises NotReady when the judge stayed away."""
        programs = [extract_program(each.response_text, prompt.response_format) for each in trajectories]
        verdicts = self.clients.judge_programs(prompt, programs, all_tests=needs_all_tests(self.reward_spec))
        for trajectory, verdict in zip(trajectories, verdicts, strict=True):
            trajectory.verdict.CopyFrom(verdict)
            # The counts say enough; a trajectory stays small.
            del trajectory.verdict.tests[:]
            self.reward(trajectory)
            trajectory.hops.append(Hop(service="sandbox-judge", at_unix_ms=int(time.time() * 1000)))

    def reward(self, trajectory: Trajectory) -> None:
        """Set the reward that its verdict earns in this run."""
        trajectory.reward = reward_of(trajectory.verdict, self.reward_spec)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the log-probs of pi0."""
        scored = self.reference.logprobs(
            [each.prompt_token_ids for each in trajectories], [each.response_token_ids for each in trajectories]
        )
        for trajectory, logprobs in zip(trajectories, scored, strict=True):
            trajectory.reference_logprobs[:] = logprobs
            trajectory.reference_hash = self.reference.model_hash
            trajectory.hops.append(Hop(service="value-estimation", at_unix_ms=int(time.time() * 1000)))


def write_solution(program: str, prompt: Prompt) -> str:
    """A person's program as the response that it would have been."""
    return write_response(program, "fenced" if prompt.response_format == "fenced" else "raw")
