"""From a PromptGroup to its RolloutGroup: the same path for the stream and for gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count

from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample
from services.inference.engine_thread import SampleGroup
from services.inference.episodes.group import StartedEpisodes, start_episodes
from services.inference.replica import ServingReplica
from services.inference.sampling import TOKENIZER, end_token_ids, prompt_tokens, sample_requests
from spo import redis_keys
from spo.errors import InvalidInput, Unreachable
from spo.model.chat import ChatFormat
from spo.model.tokenizer import decode_response, opens_reasoning, tokens_to_stop
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, RolloutGroup, Trajectory


@dataclass(frozen=True)
class StartedGroup:
    """A group the engine works on."""

    request: PromptGroup
    sampler: str
    samples: SampleGroup
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    # Whether the prompt has begun reasoning.
    opened: bool
    # Of the group's samples, those that are sampled here.
    indexes: Sequence[int]

    @property
    def alone(self) -> bool:
        """Whether nothing else is in the engine meanwhile."""
        return self.samples.alone

    @property
    def future(self) -> Future[list[Sample]]:
        return self.samples.future

    def cancel(self) -> None:
        """Abort the group's sequences, unless it is finished."""
        self.future.cancel()

    def result(self, timeout_seconds: float) -> RolloutGroup:
        """The finished group. Raises Unreachable after timeout_seconds, or what the engine raised."""
        try:
            finished = self.future.result(timeout_seconds)
        except TimeoutError:
            self.cancel()
            raise Unreachable(f"the engine did not finish the group in {timeout_seconds:.1f} s") from None
        return RolloutGroup(request=self.request, trajectories=list(map(self.trajectory, count(), finished)))

    def trajectory(self, place: int, sample: Sample) -> Trajectory:
        """A finished sample. place: of its request among those that are sampled here."""
        group, index, sample_request = self.request, self.indexes[place], self.samples.requests[place]
        now = int(time.time() * 1000)
        prefix = group.response_prefix_token_ids
        token_ids, text, stopped = self._response(sample)
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(
                group.run_id, group.group_id, index, group.attempt, sample.version_first
            ),
            group_id=group.group_id,
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            sample_index=index,
            attempt=group.attempt,
            source=group.source,
            prompt_token_ids=sample_request.prompt_token_ids[: len(sample_request.prompt_token_ids) - len(prefix)],
            response_token_ids=token_ids,
            # The prefix was given, not sample_request: it has none.
            sampling_logprobs=[] if prefix else sample.logprobs,
            response_text=text,
            reasoning_characters=self.chat.reasoning_length(text, opened=self.opened),
            policy_version_first=sample.version_first,
            policy_version_last=sample.version_last,
            temperature=sample_request.temperature,
            top_p=sample_request.top_p,
            seed=sample_request.seed,
            finish_reason=FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH,
            sampler=self.sampler,
            created_unix_ms=now,
            hops=[Hop(service="inference", at_unix_ms=now)],
        )

    def _response(self, sample: Sample) -> tuple[list[int], str, bool]:
        """Tokens, text, and whether it ended by itself."""
        prefix = self.request.response_prefix_token_ids
        token_ids, stopped = [*prefix, *sample.token_ids], sample.stopped
        with TOKENIZER:
            if prefix and self.chat.stop:
                # The engine took the prefix for prompt, and looked for no stop string that begins in it.
                length = tokens_to_stop(self.tokenizer, token_ids, self.chat)
                token_ids, stopped = token_ids[:length], stopped or length is not None
            return token_ids, decode_response(self.tokenizer, token_ids, self.chat), stopped


def start_group(
    replica: ServingReplica,
    group: PromptGroup,
    *,
    alone: bool = False,
    indexes: Sequence[int] = (),
    on_sample: Callable[[int, Sample], None] | None = None,
) -> StartedGroup | StartedEpisodes:
    """Submit a group to the engine, or begin its conversations where the prompt names an environment.

    alone: so that nothing else is in the engine when it is sampled. indexes: only these samples of it, except of
    conversations; on_sample: gets each with its place among them, in the engine's thread.

    Raises InvalidInput on a prompt or sampling that can never be served, NotFound or IntegrityError when the policy
    version it names is not available, NotReady or PreconditionFailed when this replica does not serve its run.
    """
    assignment = replica.serving(group.run_id)
    weights = None
    if group.HasField("policy_version"):
        weights = assignment.versions.resolve(group.run_id, group.policy_version)
    if group.prompt.environment:
        return start_episodes(assignment, replica.environments, group, weights, alone=alone)
    chat = assignment.spec.model.chat_format
    prompt_token_ids = prompt_tokens(assignment, group, group.prompt.text)
    ends = end_token_ids(assignment)
    prefix = tuple(group.response_prefix_token_ids)
    requests = [
        replace(request, stop=chat.stop, end_token_ids=ends)
        for request in sample_requests(prompt_token_ids, group.sampling, prefix)
    ]
    if not set(indexes) <= set(range(len(requests))):
        raise InvalidInput(f"a group of {len(requests)} samples has none of {max(indexes)}")
    indexes = indexes or range(len(requests))
    requests = [requests[index] for index in indexes]
    samples = SampleGroup(group.run_id, requests, weights, alone, on_sample=on_sample)
    assignment.engine.submit(samples)
    with TOKENIZER:
        opened = opens_reasoning(assignment.tokenizer, prompt_token_ids, chat)
    return StartedGroup(group, assignment.sampler, samples, assignment.tokenizer, chat, opened, indexes)
