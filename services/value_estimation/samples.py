"""Makes judged and scored trajectories of a prompt: samples of pi0, and programs by people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.value_estimation.reference import Reference
from services.value_estimation.service_clients import ServiceClients
from spo import redis_keys
from spo.errors import InvalidInput
from spo.observability.logs import get_logger
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import has_verdict, program_of, write_response
from spo.tasks.verifier_pool import judges_named
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
        prompt: Prompt,
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

    def _human(self, prompt: Prompt, text: str, kind: str, index: int) -> Trajectory:
        group_id = f"{kind}-{prompt.prompt_id[:24]}"
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(self.run_id, group_id, index, 0, REFERENCE_VERSION),
            group_id=group_id,
            run_id=self.run_id,
            prompt_id=prompt.prompt_id,
            sample_index=index,
            source=SOURCE_HUMAN,
            prompt_token_ids=self.reference.encode_prompt(prompt.text),
            response_token_ids=self.reference.encode_response(text),
            response_text=text,
            finish_reason=FINISH_REASON_STOP,
            sampler="human",
            created_unix_ms=int(time.time() * 1000),
        )

    def judge(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
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


def write_solution(program: str, prompt: Prompt) -> str:
    """A person's program in the format of a response to the prompt."""
    return write_response(program, "raw" if prompt.response_format == "raw" else "fenced", prompt.language)
